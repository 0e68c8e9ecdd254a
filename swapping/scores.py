"""Losses and errors of a model with a mechanism in some of its layers."""

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from attention import Attention
import models
from swapping import substitution
from swapping.source import Source
from swapping.substitution import Mechanisms
from training.step import loss_sums


class Scores(NamedTuple):
  """Loss and accuracy with some of the layers swapped, of one mechanism.

  Attributes:
    of: `(mechanisms, swapped places) -> {'loss', 'accuracy'}`.
    errors: `mechanisms -> relative error of each place`, and of all together.
  """

  of: Callable[[Mechanisms, set[str]], dict[str, float]]
  errors: Callable[[Mechanisms], tuple[list[float], float]]


def make(source: Source, attention: Attention | None) -> Scores:
  """Compiles what measures a mechanism; None for the model as it is."""
  paths = [place.path for place in source.places]
  batches, pad_id = source.batches, source.task.pad_id

  @jax.jit
  def sums(variables, mechanisms, swapped, batch):
    if attention is None:
      logits = models.forward(source.model, variables, batch)
    else:
      logits = substitution.logits(
        source.model, variables, batch, attention, mechanisms, swapped
      )
    _, nats, count = loss_sums(logits, batch["targets"], batch["weights"])
    found = source.task.metric_sums(logits, batch)
    return jnp.stack([nats, count]), found["token_accuracy"]

  @functools.partial(jax.jit, static_argnames="names")
  def squares(variables, mechanisms, batch, names):
    assert attention is not None
    valid = substitution.valid_positions(batch, pad_id)
    found = substitution.squares(
      source.model, variables, batch, valid, attention, mechanisms
    )
    return jnp.stack([found[name] for name in names])

  def of(mechanisms, places):
    swapped = {path: np.array(path in places) for path in paths}
    totals = sum(
      np.stack(
        [
          np.asarray(pair, np.float64)
          for pair in sums(source.variables, mechanisms, swapped, batch)
        ]
      )
      for batch in batches
    )
    (nats, count), (hits, of_tokens) = totals
    return {"loss": nats / count, "accuracy": hits / of_tokens}

  def errors(mechanisms):
    totals = sum(
      np.asarray(
        squares(source.variables, mechanisms, batch, names=tuple(paths)),
        np.float64,
      )
      for batch in batches
    )
    deviations, sizes = totals.T
    whole = math.sqrt(deviations.sum() / max(sizes.sum(), 1e-30))
    return np.sqrt(deviations / np.maximum(sizes, 1e-30)).tolist(), whole

  return Scores(of, errors)


def scored(source: Source, model: Any, variables: Any) -> dict[str, float]:
  """'loss' and 'accuracy' of another model on the same held-out text."""
  other = source._replace(model=model, variables=variables)
  return make(other, None).of({}, set())
