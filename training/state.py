"""The state of a run: one pytree, enough to continue exactly."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxtyping import Array, Int
import optax


class TrainState(NamedTuple):
  """Everything that a step reads and writes.

  Attributes:
    step: number of updates done.
    params: trained variables.
    constants: variables of the model that no optimiser touches.
    opt_state: state of the optimiser.
  """

  step: Int[Array, ""]
  params: Mapping[str, Any]
  constants: Mapping[str, Any]
  opt_state: optax.OptState

  @property
  def variables(self) -> dict[str, Any]:
    """What the model is called with."""
    return {"params": self.params, "constants": self.constants}
