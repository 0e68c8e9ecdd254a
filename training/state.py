"""The state of a run: one pytree, enough to continue exactly."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int
import optax


class TrainState(NamedTuple):
  """Everything that a step reads and writes.

  Attributes:
    step: number of updates done.
    params: trained variables.
    collections: what the model has beside 'params', by name, which no optimiser
      touches: 'constants', and what a step replaces, such as 'batch_stats'.
    opt_state: state of the optimiser.
  """

  step: Int[Array, ""]
  params: Mapping[str, Any]
  collections: Mapping[str, Any]
  opt_state: optax.OptState

  @classmethod
  def first(
    cls, variables: Mapping[str, Any], optimizer: optax.GradientTransformation
  ) -> "TrainState":
    """The state before the first step."""
    collections = {"constants": {}, **variables}
    params = collections.pop("params")
    step = jnp.zeros((), "int32")
    return cls(step, params, collections, optimizer.init(params))

  @property
  def variables(self) -> dict[str, Any]:
    """What the model is called with."""
    return {"params": self.params, **self.collections}
