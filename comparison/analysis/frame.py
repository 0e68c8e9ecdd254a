"""Records as pandas tables: one row per run, or one row per point of a curve."""

from collections.abc import Iterable, Mapping, Sequence
import json
import math
import shlex
from typing import Any

import pandas as pd

from attention import ATTENTIONS
from comparison.criterion import headline
from comparison.planned_run import label, point, titles
from comparison.records import Record

_RUN = (
  *("task", "attention", "width", "seed", "status", "choosing"),
  *("parameters", "unmatched_parameters", "dense_parameters"),
  *("feed_forward", "dense_feed_forward", "learning_rate"),
  *("length", "solved_at", "seconds", "cpu_seconds", "peak_bytes"),
  *("others_cores", "together"),
)
_EVALUATION_KEYS = ("step", "seconds", "split")
"""Fields of an evaluation that are not metrics."""


def runs(records: Sequence[Record]) -> pd.DataFrame:
  """One row per run: its description, its final metrics, its costs.

  Args:
    records: as `comparison.records.read` returns them.

  Returns:
    Columns: `row`, the common name of runs that differ in seed; `task`,
    `attention`, `seed`, `status`, …; `across` and `grid` as text, and their fields;
    final metrics by their names; `metric`, the main metric, with its value
    `quality` on the last held-out split and `choosing_quality` on the first;
    costs; `reason`; `command`. Sorted by task, mechanism, row, seed. A number that
    is missing or not finite is NaN.
  """
  dense = {_match_key(r): r for r in records if r["attention"] == "dense"}
  content = [_run(r) | _match(r, dense.get(_match_key(r))) for r in records]
  columns = dict.fromkeys(name for row in content for name in row)
  last = [name for name in columns if name in ("reason", "command")]
  others = [name for name in columns if name not in last]
  frame = pd.DataFrame(content, columns=[*others, *last])
  order = sorted(range(len(frame)), key=lambda n: _order(records[n]))
  return frame.iloc[order].reset_index(drop=True)


def curves(records: Iterable[Record]) -> pd.DataFrame:
  """Learning curves in long form: one row per value of each evaluation.

  Args:
    records: as `comparison.records.read` returns them.

  Returns:
    Columns `task`, `row`, `grid`, `seed`, `run`, `split`, `step`, `metric`,
    `value`.
  """
  content = []
  for record in records:
    run = {
      "task": record["task"],
      "row": label(record),
      "grid": point(record.get("grid", {})),
      "seed": record["seed"],
      "run": name(record),
    }
    content += [
      {
        **run,
        "split": line["split"],
        "step": line["step"],
        "metric": metric,
        "value": value,
      }
      for line in record.get("history", ())
      for metric, value in line.items()
      if metric not in _EVALUATION_KEYS and is_number(value)
    ]
  columns = ["task", "row", "grid", "seed", "run", "split", "step", "metric"]
  columns.append("value")
  return pd.DataFrame(content, columns=columns)


def name(record: Record) -> str:
  """The name of a run: 'recall, delta, learning_rate=0.001, seed 0'."""
  grid = point(record.get("grid", {}))
  parts = (record["task"], label(record), grid, f"seed {record['seed']}")
  return ", ".join(filter(None, parts))


def rank(attention: str) -> int:
  """The position of a mechanism in tables; variants follow all mechanisms."""
  names = list(ATTENTIONS)
  return names.index(attention) if attention in names else len(names)


def is_number(value: Any) -> bool:
  """Whether a value can be averaged: a finite number that is not a boolean."""
  is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
  return is_real and math.isfinite(value)


def splits(record: Record) -> tuple[str, str]:
  """The split on which points are chosen, and the reported split.

  They are the first and the last held-out split of a run, or its only one.
  """
  reported = record.get("final", {}).get("split", "")
  names = (line["split"] for line in record.get("history", ()))
  return next((x for x in names if x != "train"), reported), reported


def _numbers(line: Mapping[str, Any]) -> dict[str, float]:
  return {
    k: v for k, v in line.items() if k not in _EVALUATION_KEYS and is_number(v)
  }


def _run(record: Record) -> dict[str, Any]:
  measured = record.get("measured", {})
  final = record.get("final", {})
  metrics = _numbers(final)
  metric = headline(metrics)
  choosing_split, reported = splits(record)
  choosing = [
    x for x in record.get("history", ()) if x["split"] == choosing_split
  ]
  settings = {**record.get("across", {}), **record.get("grid", {})}
  machine, fields = record.get("machine") or {}, titles(record.get("grid", {}))
  return {
    "row": label(record),
    "run": name(record),
    **{name: _cell(record.get(name)) for name in _RUN},
    "slots": record.get("slots") or "",
    "options": record.get("options") or "",
    "choosing": bool(record.get("choosing")),
    "at_edge": ", ".join(fields.get(x, x) for x in record.get("at_edge", ())),
    "across": point(record.get("across", {})),
    "grid": point(record.get("grid", {})),
    **{field: _cell(value) for field, value in settings.items()},
    "split": reported,
    "metric": metric,
    "quality": metrics.get(metric) if metric else None,
    "choosing_split": choosing_split,
    "choosing_quality": _cell(choosing[-1].get(metric)) if choosing else None,
    **metrics,
    **{k: _cell(v) for k, v in measured.items() if _is_scalar(v)},
    **{k: v for k, v in machine.items() if k not in ("jax", "device")},
    "notes": "\n".join(
      f"{k}: {v}" for k, v in measured.get("notes", {}).items()
    ),
    "reason": record.get("reason") or None,
    "command": shlex.join(["python", "train.py", *record["arguments"]]),
  }


def _match_key(record: Record) -> tuple[str, str]:
  """Returns the key of runs that are compared at equal parameter counts."""
  return record["task"], point(record.get("across", {}))


def _match(record: Record, dense: Record | None) -> dict[str, Any]:
  """The sizes of the dense model, which older records do not have."""
  if dense is None or "dense_parameters" in record:
    return {}
  return {
    "dense_parameters": dense.get("parameters") or None,
    "feed_forward": _feed_forward(record),
    "dense_feed_forward": _feed_forward(dense),
  }


def _feed_forward(record: Record) -> int | None:
  """The feed-forward width in the command of a run, or None."""
  option = "--config.model.mlp_features="
  arguments = [x for x in record["arguments"] if x.startswith(option)]
  return int(arguments[-1].removeprefix(option)) if arguments else None


def _is_scalar(value: Any) -> bool:
  return value is None or isinstance(value, (bool, int, float, str))


def _cell(value: Any) -> Any:
  """The value, or None for infinity and NaN, which CSV and JSON do not have."""
  is_infinite = isinstance(value, float) and not math.isfinite(value)
  return None if is_infinite else value


def _order(record: Record) -> tuple[Any, ...]:
  """The sort key: task, mechanism, `across`, width (none last), grid and seed."""
  across, width = record.get("across", {}), record.get("width")
  return (
    record["task"],
    rank(record["attention"]),
    record["attention"],
    [_size(value) for _, value in sorted(across.items())],
    (width is None, width or ""),
    point(record.get("grid", {})),
    record["seed"],
  )


def _size(value: Any) -> tuple[bool, float, str]:
  """A sort key that orders numbers by size, before texts."""
  if is_number(value):
    return False, value, ""
  return True, 0.0, json.dumps(value)
