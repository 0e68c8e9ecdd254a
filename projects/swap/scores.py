"""Losses and errors of a model with a mechanism in some of its layers."""

from collections.abc import Callable
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from attention import Attention
import models
from projects.swap import substitution
from projects.swap.source import Source
from projects.swap.substitution import Mechanisms
from training.step import cross_entropy


class Quality(NamedTuple):
  """Loss and accuracy of one mechanism with some of the layers swapped.

  Attributes:
    measure: `(mechanisms, swapped modules) -> {'loss', 'accuracy'}`.
    errors: `mechanisms -> (relative error of each module, total relative error)`.
  """

  measure: Callable[[Mechanisms, set[str]], dict[str, float]]
  errors: Callable[[Mechanisms], tuple[list[float], float]]


def make(source: Source, attention: Attention | None) -> Quality:
  """Compiles the measurements of a mechanism; None means the original model."""
  paths = [module.path for module in source.modules]
  batches, pad_id = source.batches, source.task.pad_id

  @jax.jit
  def sums(variables, mechanisms, swapped, batch):
    if attention is None:
      logits = models.forward(source.model, variables, batch)
    else:
      logits = substitution.logits(
        source.model, variables, batch, attention, mechanisms, swapped
      )
    _, nats, count = cross_entropy(logits, batch)
    metrics = source.task.metric_sums(logits, batch)
    return jnp.stack([jnp.stack([nats, count]), metrics["token_accuracy"]])

  @jax.jit
  def squares(variables, mechanisms, batch):
    assert attention is not None
    valid = substitution.valid_positions(batch, pad_id)
    norms = substitution.squares(
      source.model, variables, batch, valid, attention, mechanisms
    )
    return jnp.stack([norms[path] for path in paths])

  def total(function: Callable[[Any], Array]) -> np.ndarray:
    """Sums a function of a batch over all batches, in float64."""
    parts = [np.asarray(function(batch), np.float64) for batch in batches]
    return np.stack(parts).sum(0)

  def measure(mechanisms, modules):
    swapped = {path: np.array(path in modules) for path in paths}
    (nats, count), (hits, tokens) = total(
      lambda batch: sums(source.variables, mechanisms, swapped, batch)
    )
    return {"loss": float(nats / count), "accuracy": float(hits / tokens)}

  def errors(mechanisms):
    deviations, sizes = total(
      lambda batch: squares(source.variables, mechanisms, batch)
    ).T
    sizes = np.maximum(sizes, 1e-30)
    total_error = math.sqrt(deviations.sum() / sizes.sum())
    return np.sqrt(deviations / sizes).tolist(), total_error

  return Quality(measure, errors)


def score(source: Source, model: Any, variables: Any) -> dict[str, float]:
  """Returns 'loss' and 'accuracy' of another model on the same held-out text."""
  other = source._replace(model=model, variables=variables)
  return make(other, None).measure({}, set())
