"""The state of a run: one pytree, from which the run continues bit-identically."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np
import optax
import optax.contrib

from training.config import TrainConfig

Params = Mapping[str, Any]


class TrainState(NamedTuple):
  """The state that a training step reads and writes.

  Attributes:
    step: number of updates so far.
    seed: seed of dropout; that of step i depends only on (seed, i).
    params: trained variables.
    collections: the model's other collections by name, which the optimiser does not
      update: 'constants', and those that a step replaces, such as 'batch_stats'.
    opt_state: state of the optimiser.
    ema: running mean of `evaluated_params`, in float32, or None.
  """

  step: Int[Array, ""]
  seed: Int[Array, ""]
  params: Mapping[str, Any]
  collections: Mapping[str, Any]
  opt_state: optax.OptState
  ema: Mapping[str, Any] | None = None

  @classmethod
  def first(
    cls,
    variables: Mapping[str, Any],
    optimizer: optax.GradientTransformation,
    seed: int | Int[Array, ""] = 0,
    has_ema: bool = False,
    peak: Float[Array | np.ndarray, ""] | None = None,
  ) -> "TrainState":
    """Creates the state before the first step.

    Args:
      variables: 'params' and the model's other collections.
      optimizer: from `make_optimizer`.
      seed: seed of dropout.
      has_ema: whether there is a running mean; it starts as the parameters.
      peak: the peak learning rate; None is that of the optimiser.
    """
    collections = {"constants": {}, **variables}
    params = collections.pop("params")
    step, seed = jnp.zeros((), "int32"), jnp.asarray(seed, "int32")
    # A copy, because a step donates both.
    ema = jax.tree.map(jnp.copy, float32(params)) if has_ema else None
    opt_state: Any = optimizer.init(params)
    if peak is not None:
      hyperparams = {"peak": jnp.asarray(peak, "float32")}
      opt_state = opt_state._replace(hyperparams=hyperparams)
    return cls(step, seed, params, collections, opt_state, ema)

  @property
  def variables(self) -> dict[str, Any]:
    """The variables for evaluation, generation and export.

    The parameters are the running mean if there is one, and otherwise
    `evaluated_params`.
    """
    if self.ema is None:
      params = evaluated_params(self.params, self.opt_state)
    else:
      params = jax.tree.map(_cast, self.ema, self.params)
    return {"params": params, **self.collections}


def seed_and_peak(config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
  """Returns the seed and the peak learning rate of a run.

  They are part of the state, so runs that differ only in these compile the same
  program.
  """
  peak = config.optimizer.learning_rate
  # `optax.inject_hyperparams` accepts a NumPy array as a number, but not np.float32.
  return np.asarray(config.seed, "int32"), np.asarray(peak, "float32")


def evaluated_params(params: Params, opt_state: optax.OptState) -> Params:
  """Returns the parameters with which an optimiser evaluates the model.

  Schedule-free optimisers compute gradients at y, and evaluate at the averaged
  parameters x (arXiv:2405.15682). Every other optimiser evaluates at its parameters.
  """
  for state in _schedule_free_states(opt_state):
    params = _average(params, state)
  return params


def is_schedule_free(opt_state: optax.OptState) -> bool:
  """Returns whether `evaluated_params` are an average of parameters."""
  return bool(_schedule_free_states(opt_state))


def float32(tree: Any) -> Any:
  """Casts arrays with fewer bits than float32 to float32."""
  return jax.tree.map(
    lambda x: x.astype(jnp.promote_types(x.dtype, "float32")), tree
  )


def _schedule_free_states(opt_state: optax.OptState) -> list[Any]:
  def is_state(node):
    return isinstance(node, optax.contrib.ScheduleFreeState)

  nodes = jax.tree.leaves(opt_state, is_leaf=is_state)
  return [node for node in nodes if is_state(node)]


@jax.jit
def _average(params: Params, state: Any) -> Params:
  """Returns the parameters x of a schedule-free state; masked ones are unchanged."""

  def average(z, y):
    if isinstance(z, optax.MaskedNode):
      return y
    x = optax.contrib.schedule_free_eval_params(state._replace(z=z), y)
    return x.astype(y.dtype)

  return jax.tree.map(
    average,
    state.z,
    params,
    is_leaf=lambda node: isinstance(node, optax.MaskedNode),
  )


def _cast(mean: Any, param: Any) -> Any:
  return mean if mean.dtype == param.dtype else mean.astype(param.dtype)
