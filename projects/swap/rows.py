"""Rows of results.csv and layers.csv, and descriptions of their columns."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from comparison.analysis.summary import Cost
from comparison.report.tables import NOTHING, Cell
from projects.swap.records import CANNOT, OWN, Record

_STAGES = ("", "transfer_", "finetune_")

QUALITY: Mapping[str, Cost] = {
  "keep": Cost("layers kept", "", 1, "layers with the model's own mechanism"),
  "error": Cost(
    "error",
    "",
    1,
    "relative Frobenius distance of the attention's outputs, over all layers, "
    "from those of the model's own mechanism on the same queries, keys and values",
  ),
  "transfer_error": Cost("error, transferred", "", 1, "after the transfer"),
  "loss": Cost("loss", "nats", 1, "on held-out text, directly after the swap"),
  "transfer_loss": Cost("loss, transferred", "nats", 1, "after the transfer"),
  "finetune_loss": Cost(
    "loss, fine-tuned", "nats", 1, "after fine-tuning of the whole model"
  ),
  "loss_added": Cost("added", "%", 100, "last loss relative to own, minus 1"),
  "perplexity": Cost("perplexity", "", 1, "exp of the last loss"),
  "last_accuracy": Cost(
    "accuracy", "%", 100, "correct tokens, with the last weights"
  ),
  "trained": Cost("fitted", "", 1, "trained parameters of the mechanism"),
}
"""Columns with the quality of a swapped model."""

COSTS: Mapping[str, Cost] = {
  "step_seconds": Cost("step", "ms", 1e3, "median time of a training step"),
  "temp_bytes": Cost(
    "temporaries",
    "MiB",
    2**-20,
    "memory that XLA reserves for the intermediate results of a step",
  ),
  "long_step_seconds": Cost("long step", "ms", 1e3, "the same at --length"),
  "long_temp_bytes": Cost(
    "long temporaries", "MiB", 2**-20, "the same at --length"
  ),
  "cache_bytes": Cost(
    "cache",
    "KiB",
    2**-10,
    "cache of all layers for one window of tokens during generation",
  ),
  "cache_token_bytes": Cost(
    "cache per token", "B", 1, "growth of the cache per token beyond the window"
  ),
}
"""Columns with the costs of a model that has the mechanism in every layer."""


def results(records: Sequence[Record]) -> list[dict[str, Any]]:
  """Returns one row per swapped model, and one for the original model.

  Args:
    records: records of the mechanisms and of the original model.
  """
  base = own_loss(records)
  rows = []
  for record in records:
    shared = {
      **{name: record.get(name) for name in ("attention", "name", "status")},
      **{name: record.get(name) for name in COSTS},
      **{n: record.get(n) for n in ("error", "transfer_error", "trained")},
      "options": record.get("all_options", ""),
      "reason": _reason(record),
    }
    for swap in record.get("swaps", [{}]):
      losses = {f"{s}loss": swap.get(f"{s}loss") for s in _STAGES}
      accuracies = {f"{s}accuracy": swap.get(f"{s}accuracy") for s in _STAGES}
      loss, accuracy = _last(losses), _last(accuracies)
      last = {
        "perplexity": None if loss is None else _exp(loss),
        "last_accuracy": accuracy,
        "loss_added": _relative_increase(loss, base),
      }
      kept = " ".join(map(str, swap.get("kept", ())))
      scores = {"keep": swap.get("keep"), "kept": kept, **losses, **accuracies}
      folder = swap.get("folder") or None
      rows.append({**shared, **scores, **last, "folder": folder})
  first = ["attention", "name", "status", "keep", "kept"]
  columns = dict.fromkeys([*first, *(name for row in rows for name in row)])
  columns.pop("reason")
  return [{name: row[name] for name in (*columns, "reason")} for row in rows]


def layers(records: Sequence[Record]) -> list[dict[str, Any]]:
  """Returns one row per mechanism and layer."""
  base = own_loss(records)
  return [
    {
      "attention": record["attention"],
      "side": layer["side"],
      "layer": layer["layer"],
      "error": layer["error"],
      "transfer_error": layer.get("transfer_error"),
      "loss": layer["loss"],
      "loss_added": _relative_increase(layer["loss"], base),
      "transfer_loss": layer.get("transfer_loss"),
      "transfer_loss_added": _relative_increase(
        layer.get("transfer_loss"), base
      ),
    }
    for record in records
    for layer in record.get("layers", ())
  ]


def line(record: Record) -> str:
  """Formats a record in one line, for a terminal."""
  label = record["attention"]
  if record["status"] == CANNOT:
    return f"{label}: {record['reason']}"
  parts = []
  for swap in record["swaps"]:
    losses = [swap.get(f"{stage}loss") for stage in _STAGES]
    values = " → ".join(f"{loss:.4f}" for loss in losses if loss is not None)
    keep = swap["keep"]
    kept = f" ({keep} layer{'s'[: keep != 1]} kept)" if keep else ""
    parts.append(f"loss {values}{kept}")
  options = record.get("all_options", "")
  name = f"{label} ({options})" if options else label
  return "; ".join(
    filter(None, [f"{name}: {', '.join(parts)}", _reason(record)])
  )


def cell(value: Any, column: Cost) -> Cell:
  """Formats a value in the unit of its column."""
  if value is None:
    return Cell(NOTHING)
  scaled = value * column.scale
  if column.unit == "%":
    return Cell(f"{scaled:.2f}", scaled)
  is_large = abs(scaled) >= 1000
  return Cell(f"{scaled:,.0f}" if is_large else f"{scaled:.4g}", scaled)


def own_loss(records: Sequence[Record]) -> float | None:
  """Returns the loss of the original model."""
  for record in records:
    if record["attention"] == OWN:
      return record["swaps"][0]["loss"]
  return None


def _relative_increase(loss: float | None, base: float | None) -> float | None:
  return None if loss is None or not base else loss / base - 1


def _last(values: dict[str, float | None]) -> float | None:
  return next((v for v in reversed(values.values()) if v is not None), None)


def _exp(loss: float) -> float:
  return math.exp(loss) if loss < 700 else math.inf


def _reason(record: Record) -> str | None:
  notes = record.get("notes", {}).items()
  reasons = [record.get("reason") or "", *(f"{k}: {v}" for k, v in notes)]
  return "; ".join(filter(None, reasons)) or None
