"""The best evaluation of a run, and early stopping."""

from collections.abc import Mapping
import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

import models
from settings.errors import ConfigError, RunError
from training import step
from training.config import TrainConfig


class BestEvaluation:
  """Tracks the best evaluation so far, and the number of evaluations since.

  Args:
    config: the config of the run, with the metric, the patience and the threshold.
    record: `record` of the checkpoint from which the run continues; empty at the
      start.
  """

  def __init__(self, config: TrainConfig, record: Mapping[str, Any]):
    self._metric, self._patience = config.best_metric, config.patience
    self._threshold = config.stopping_threshold
    self._value: float | None = record.get("value")
    self._evaluations_since: int = record.get("evaluations_since", 0)

  @property
  def record(self) -> dict[str, Any]:
    """The values that a checkpoint stores."""
    return {
      "value": self._value,
      "evaluations_since": self._evaluations_since,
    }

  def add(self, values: Mapping[str, Any], counts: bool) -> float | None:
    """Adds an evaluation.

    Args:
      values: maps metric names to values.
      counts: whether later evaluations are compared with this one.

    Returns:
      The metric if it is better than in all earlier evaluations, otherwise None.

    Raises:
      RunError: the evaluation does not have the metric.
    """
    if self._metric not in values:
      raise RunError(
        f"config.best_metric: this evaluation has no {self._metric!r}, because "
        f"nothing was counted for it; it has {', '.join(values)}"
      )
    value = values[self._metric]
    if self._value is None:
      is_gain = not math.isnan(value)
    else:
      is_gain = self._is_better(value, self._value)
    if counts and is_gain:
      self._value, self._evaluations_since = value, 0
    elif counts:
      self._evaluations_since += 1
    return value if is_gain else None

  @property
  def end(self) -> str:
    """The reason why the run ends after this evaluation; empty if it continues."""
    value, threshold = self._value, self._threshold
    has_both = value is not None and threshold is not None
    if has_both and not self._is_better(threshold, value):
      return f"{self._metric} reached stopping_threshold={threshold:g}"
    if 0 < self._patience <= self._evaluations_since:
      return f"no gain in {self._metric} in {self._patience} evaluations"
    return ""

  def _is_better(self, value: float, other: float) -> bool:
    return value < other if is_lower_better(self._metric) else value > other


def check_metric(experiment: Any) -> None:
  """Checks that evaluations will have the metric of the config.

  It reads held-out batches until the metric counts an example, without computing
  logits.

  Raises:
    ConfigError: the evaluations will not have it.
  """
  name, task = experiment.config.train.best_metric, experiment.task
  forward = functools.partial(models.forward, experiment.model)
  variables = jax.eval_shape(lambda state: state.variables, experiment.shapes)

  @jax.jit
  def counts(batch):
    logits = jax.eval_shape(forward, variables, batch)
    zeros = jnp.zeros(logits.shape, logits.dtype)
    sums = step.metric_sums(task, zeros, batch)
    return {metric: count for metric, (_, count) in sums.items()}

  totals: dict[str, float] = {}
  known: list[str] = []
  for batch in task.eval_batches(task.eval_splits[0]):
    for metric, count in jax.device_get(counts(batch)).items():
      totals[metric] = totals.get(metric, 0.0) + float(count)
    values = task.summarize({k: (count, count) for k, count in totals.items()})
    known = [metric for metric in values if metric not in task.baselines]
    if name in known:
      return
  raise ConfigError(
    f"config.best_metric: expected one of {', '.join(known)}, which the "
    f"evaluations of this task have, got {name!r}"
  )


_LOWER = re.compile(
  ".*(loss|error_rate|perplexity|cross_entropy|negative_log_likelihood)"
  "|(.*_)?(error|wer|cer|mse|rmse|mae|ppl|distance)"
  r"|(.*_)?(loss|nll|bits|nats)(_per_\w+)?"
)
"""Names of metrics whose lower values are better, also in a user's own task."""


def is_lower_better(metric: str) -> bool:
  """Returns whether lower values are better, as for losses, errors and perplexities."""
  return _LOWER.fullmatch(metric) is not None
