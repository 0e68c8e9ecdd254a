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
    batch_stats: running statistics of a model with batch norm; else None.
  """

  step: Int[Array, ""]
  params: Mapping[str, Any]
  constants: Mapping[str, Any]
  opt_state: optax.OptState
  batch_stats: Mapping[str, Any] | None = None

  @property
  def variables(self) -> dict[str, Any]:
    """What the model is called with."""
    variables = {"params": self.params, "constants": self.constants}
    if self.batch_stats is not None:
      variables["batch_stats"] = self.batch_stats
    return variables
