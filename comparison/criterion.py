"""The main metric of a task, and whether an evaluation solves the task."""

from collections.abc import Iterable, Mapping
import math
from typing import Any

from training.best import is_lower_better

LAST = "last_accuracy"
"""Accuracy at the last position, for tasks with a target at every position."""

HEADLINES = (
  "bleu",
  "exact_match",
  LAST,
  "accuracy",
  "error_rate",
  "bits_per_character",
  "token_accuracy",
  "loss",
)
"""Main metrics; the first one in the last evaluation of a task is used."""


def headline(names: Iterable[str]) -> str | None:
  """Returns the main metric among some names; None if there is none."""
  metrics = set(names)
  return next((name for name in HEADLINES if name in metrics), None)


def upper_bound(metric: str) -> float:
  """Returns the largest possible value of a metric; the smallest is 0."""
  if metric == "bleu":
    return 100.0
  is_share = "accuracy" in metric or metric == "exact_match"
  return 1.0 if is_share else math.inf


def is_solved(line: Mapping[str, Any], threshold: float | None) -> bool:
  """Returns whether an evaluation solves its task.

  Args:
    line: maps metrics to values.
    threshold: the smallest value of the main metric that solves the task; None for
      a task without a threshold.
  """
  metric = headline(line)
  if threshold is None or metric is None or is_lower_better(metric):
    return False
  return line[metric] >= threshold
