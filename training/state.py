"""The state of a run: one pytree, enough to continue exactly."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
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
    ema: running mean of the parameters, like them; None where there is none.
  """

  step: Int[Array, ""]
  params: Mapping[str, Any]
  collections: Mapping[str, Any]
  opt_state: optax.OptState
  ema: Mapping[str, Any] | None = None

  @classmethod
  def first(
    cls,
    variables: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    has_ema: bool = False,
  ) -> "TrainState":
    """The state before the first step; a running mean begins at the parameters."""
    collections = {"constants": {}, **variables}
    params = collections.pop("params")
    step = jnp.zeros((), "int32")
    # Of its own memory, as a step is given both.
    ema = jax.tree.map(jnp.copy, params) if has_ema else None
    return cls(step, params, collections, optimizer.init(params), ema)

  @property
  def variables(self) -> dict[str, Any]:
    """What the model is evaluated with: the mean of parameters where there is one."""
    params = self.params if self.ema is None else self.ema
    return {"params": params, **self.collections}
