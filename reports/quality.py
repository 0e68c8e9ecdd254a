"""How good a run is: one number of its end, and one of its way there."""

from collections.abc import Iterable, Mapping
import math
from typing import Any, TypeGuard

from comparison.records import Record

LOSS = "loss"
BLEU = "bleu"
ERROR_RATE = "error_rate"
_HEADLINES = (
  BLEU,
  "exact_match",
  "accuracy",
  ERROR_RATE,
  "token_accuracy",
  LOSS,
)
_CURVES = ("accuracy", ERROR_RATE, "token_accuracy")
# Of a line of metrics.jsonl, what tells where it stands.
_PLACE = ("step", "seconds")


def metrics(line: Mapping[str, Any]) -> dict[str, float]:
  """The finite numbers of an evaluation: metric -> value."""
  return {
    name: value
    for name, value in line.items()
    if is_number(value) and name not in _PLACE
  }


def is_number(value: Any) -> TypeGuard[float]:
  """Whether it can be averaged: no text, no truth value, not infinite."""
  is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
  return is_real and math.isfinite(value)


def highest(name: str) -> float:
  """The most that a column of results.csv can be; none can be below 0."""
  if name == BLEU:
    return 100.0
  is_share = "accuracy" in name or name in ("exact_match", "best_quality")
  return 1.0 if is_share else math.inf


def headline(record: Record) -> str | None:
  """Name of the final metric that a run is judged by; None without any."""
  found = metrics(record.get("final", {}))
  return next((name for name in _HEADLINES if name in found), None)


def common(lines: Iterable[Mapping[str, Any]]) -> str | None:
  """The first metric to judge by that all evaluations have, finite or not."""
  found = list(lines)
  return next(
    (name for name in _HEADLINES if all(name in line for line in found)), None
  )


def splits(record: Record) -> tuple[str, str]:
  """The held-out split that choices are made by, and the one that is reported.

  The first and the last that a run evaluates; the same where it has one.
  """
  reported = record.get("final", {}).get("split", "")
  lines = record.get("history", ())
  held_out = (line["split"] for line in lines if line["split"] != "train")
  return next(held_out, reported), reported


def to_choose_by(record: Record, name: str) -> float | None:
  """A metric at the end on the split that choices are made by; None without."""
  chosen_by, reported = splits(record)
  if chosen_by == reported:
    return metrics(record.get("final", {})).get(name)
  lines = [x for x in record["history"] if x["split"] == chosen_by]
  return metrics(lines[-1]).get(name)


def curve(record: Record) -> str | None:
  """Name of the quality that its evaluations follow; None without any."""
  for name in _CURVES:
    if any(name in line for line in evaluations(record)):
      return name
  return None


def evaluations(record: Record) -> list[Mapping[str, Any]]:
  """Lines of its history on the split that is evaluated while it trains."""
  split, _ = splits(record)
  return [line for line in record.get("history", ()) if line["split"] == split]


def best(record: Record) -> float | None:
  """Best value of the curve over all evaluations; None without any."""
  name = curve(record)
  if name is None:
    return None
  lines = (metrics(line) for line in evaluations(record))
  values = [line[name] for line in lines if name in line]
  extreme = min if is_better(name, 0, 1) else max
  return extreme(values, default=None)


def is_better(name: str, value: float, other: float) -> bool:
  """Whether `value` of a metric beats another: losses and errors when lower."""
  is_fault = name in (LOSS, ERROR_RATE)
  return value < other if is_fault else value > other
