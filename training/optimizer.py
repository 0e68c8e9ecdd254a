"""Optimisers and learning-rate schedules, from Optax."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import optax

from training.config import OptimizerConfig

_NOT_DECAYED = ("bias", "scale")


def make_schedule(
  config: OptimizerConfig,
  num_steps: int,
  learning_rate: Float[Array, ""] | None = None,
) -> optax.Schedule:
  """Learning rate of each step: linear warm-up, then the named schedule.

  Warm-up runs from `peak / (warmup_steps + 1)` so that no step is wasted at
  rate 0, and reaches the peak at step `warmup_steps`.

  Args:
    config: peak, schedule, warm-up and final fraction.
    num_steps: length of the run; where 'cosine' ends.
    learning_rate: the peak, where a program takes it as an argument; default
      that of the config.

  Returns:
    step → learning rate.
  """
  warmup = config.warmup_steps
  peak = config.learning_rate if learning_rate is None else learning_rate
  match config.schedule:
    case "constant":
      after = optax.constant_schedule(peak)
    case "cosine":
      after = optax.cosine_decay_schedule(
        peak, max(num_steps - warmup, 1), alpha=config.final_fraction
      )
    case "inverse_sqrt":
      # Vaswani et al. 2017: falls as 1/√step, and is the peak at `warmup`.
      start = max(warmup, 1)

      def after(count):
        return peak * jnp.sqrt(start / jnp.maximum(start + count, 1))

  if not warmup:
    return after
  before = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
  return optax.join_schedules([before, after], [warmup])


def make_optimizer(
  config: OptimizerConfig,
  num_steps: int,
  learning_rate: Float[Array, ""] | None = None,
) -> optax.GradientTransformation:
  """Clipping, then Adam or AdamW under the schedule.

  Args:
    config: see `OptimizerConfig`.
    num_steps: length of the run.
    learning_rate: as in `make_schedule`.

  Returns:
    `(init, update)`, as every Optax transformation.
  """
  schedule = make_schedule(config, num_steps, learning_rate)
  moments = {"b1": config.b1, "b2": config.b2, "eps": config.eps}
  if config.name == "adam":
    update = optax.adam(schedule, **moments)
  else:
    update = optax.adamw(
      schedule,
      weight_decay=config.weight_decay,
      mask=_decayed,
      **moments,
    )
  if config.clip_norm is None:
    return update
  return optax.chain(optax.clip_by_global_norm(config.clip_norm), update)


def _decayed(params: optax.Params) -> optax.Params:
  """True where weight decay applies: not to biases and norm scales."""
  return jax.tree.map_with_path(
    lambda path, _: path[-1].key not in _NOT_DECAYED, params
  )
