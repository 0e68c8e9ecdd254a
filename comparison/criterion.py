"""The metric that a task is judged by, and from which value it is solved."""

from collections.abc import Iterable, Mapping
import math
from typing import Any

from training.best import is_lower_better

LAST = "last_accuracy"
"""Of a task that answers every prefix: at the last position alone."""

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
"""Metrics that a task is judged by: the first that its last evaluation has."""


def headline(names: Iterable[str]) -> str | None:
  """The metric that decides among those of these names; None without any."""
  metrics = set(names)
  return next((name for name in HEADLINES if name in metrics), None)


def upper_bound(metric: str) -> float:
  """The most that a metric can be; none can be below 0."""
  if metric == "bleu":
    return 100.0
  is_share = "accuracy" in metric or metric == "exact_match"
  return 1.0 if is_share else math.inf


def is_solved(line: Mapping[str, Any], threshold: float | None) -> bool:
  """Whether an evaluation has its task solved.

  Args:
    line: metric -> value.
    threshold: of the metric that decides; None of a task that is a matter of
      degree.
  """
  metric = headline(line)
  if threshold is None or metric is None or is_lower_better(metric):
    return False
  return line[metric] >= threshold
