"""Optimisers and learning-rate schedules, from Optax."""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np
import optax
import optax.contrib

from attention.names import resolve, suggestion
from settings.errors import one_line
from training.config import OptimizerConfig
from training.state import float32

_NOT_DECAYED = (
  *("bias", "scale", "log_rate", "skip"),
  *("/correction", "/level_gain", "/regularizer"),
)
"""Suffixes of the names of parameters without weight decay; '/' precedes a whole name.

These are biases, scales of norms, A and D of Mamba, D of Comba, L of log-linear
attention, and λ of MesaNet. The authors' code also exempts them.
"""

_OPTIONAL = ("b1", "b2", "eps", "weight_decay")
"""Config fields that may be None, for the optimiser's default."""

_WEIGHT_DECAYS = {
  "weight_decay": ("mask", "weight_decay_mask"),
  "weight_decay_rate": ("weight_decay_mask",),  # Of Adafactor.
  "adam_weight_decay": (),  # Of Muon.
}
"""Maps weight decay arguments of Optax to the arguments that mask the decay."""


def make_schedule(
  config: OptimizerConfig,
  num_steps: int,
  peak: float | Float[Array, ""] | None = None,
) -> optax.Schedule:
  """Creates the learning-rate schedule: linear warm-up, then the named schedule.

  The warm-up starts at `peak / (warmup_steps + 1)`, so that no step has rate 0, and
  reaches the peak at step `warmup_steps`.

  Args:
    config: schedule, warm-up and final fraction.
    num_steps: length of the run, where 'cosine' ends.
    peak: the highest rate, which may be traced; None is that of the config.
  """
  warmup = config.warmup_steps
  rate = np.float32(config.learning_rate) if peak is None else peak
  match config.schedule:
    case "constant":
      schedule = optax.constant_schedule(rate)
    case "cosine":
      schedule = optax.cosine_decay_schedule(
        rate, max(num_steps - warmup, 1), alpha=config.final_fraction
      )
    case "inverse_sqrt":
      # Vaswani et al. 2017: decreases as 1/√step from the peak at `warmup`.
      shift = max(warmup, 1)

      def schedule(count):
        return rate * jnp.sqrt(shift / jnp.maximum(shift + count, 1))

  if not warmup:
    return schedule

  def ramp(count):
    start = rate / (warmup + 1) - rate
    return start * (1 - jnp.clip(count, 0, warmup) / warmup) + rate

  return optax.join_schedules([ramp, schedule], [warmup])


def make_optimizer(
  config: OptimizerConfig, num_steps: int
) -> optax.GradientTransformation:
  """Creates gradient clipping and the named optimiser with its schedule.

  The peak of the schedule is in the optimiser's state (`optax.inject_hyperparams`). The
  optimiser gets only the arguments that the config sets. It computes and stores its
  state in float32, even if parameters have fewer bits.

  Args:
    config: the optimiser and its schedule.
    num_steps: length of the run.

  Raises:
    ValueError: there is no such optimiser, or it refuses an option; the message
      starts with the config field.
  """
  factory = _factory(config.name)
  known = inspect.signature(factory).parameters
  options = dict(config.options)
  for name in _OPTIONAL:
    value = getattr(config, name)
    if name in known and value is not None:
      options[name] = value
    elif name == "weight_decay" and value:
      raise ValueError(
        f"weight_decay: {config.name} has none, got {value}; set 0 or use "
        "optimizer.name='adamw'"
      )
  for name in options:
    if name not in known:
      fields = [field.name for field in dataclasses.fields(config)]
      raise ValueError(
        f"{name}: unknown; {config.name} takes {', '.join(known)}"
        f"{suggestion(name, [*fields, *known])}"
      )
  for name, masks in _WEIGHT_DECAYS.items():
    mask = next((argument for argument in masks if argument in known), None)
    if name in known and mask:
      options.setdefault(mask, _decay_mask)
    elif options.get(name):
      raise ValueError(
        f"{name}: {config.name} has no mask for it, so biases and scales of norms "
        f"would decay too; expected 0, got {options[name]}; or pass a function of "
        "your own that takes a mask (docs/howto/optimiser.md)"
      )

  def scheduled(peak):
    schedule = make_schedule(config, num_steps, peak)
    update = factory(learning_rate=schedule, **options)
    if config.clip_norm is not None:
      update = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    return update

  try:
    scheduled(config.learning_rate)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"name: {config.name} refused its options: {error}"
    ) from error
  inject = optax.inject_hyperparams(scheduled, hyperparam_dtype=jnp.float32)
  return _in_float32(inject(config.learning_rate))


def peak(opt_state: optax.OptState) -> Float[Array, ""]:
  """Returns the peak learning rate in the state of an optimiser of `make_optimizer`."""
  return cast(Any, opt_state).hyperparams["peak"]


def with_defaults(config: OptimizerConfig) -> OptimizerConfig:
  """Replaces None in a config by the optimiser's defaults.

  The recorded config of a run then has the numbers with which it was trained. Fields
  that the optimiser does not take stay None.

  Raises:
    ValueError: there is no such optimiser; the message starts with the config field.
  """
  known = inspect.signature(_factory(config.name)).parameters
  defaults = {
    name: float(known[name].default)
    for name in _OPTIONAL
    if name in known
    and getattr(config, name) is None
    and isinstance(known[name].default, int | float)
  }
  return dataclasses.replace(config, **defaults)


def remarks(config: OptimizerConfig, num_steps: int) -> list[str]:
  """Returns a sentence for each field that has no effect, and for a long warm-up."""
  known = inspect.signature(_factory(config.name)).parameters
  remarks = [
    f"optimizer.{name} has no effect: {config.name} does not take it"
    for name in _OPTIONAL
    if getattr(config, name) and name not in known
  ]
  if config.final_fraction and config.schedule != "cosine":
    remarks.append(
      f"optimizer.final_fraction has no effect: the schedule is {config.schedule}"
    )
  if (steps := config.warmup_steps) >= num_steps:
    remarks.append(
      f"the warm-up of {steps} steps (optimizer.warmup_steps) lasts to the end"
    )
  return remarks


def check_update(
  name: str, optimizer: optax.GradientTransformation, params: optax.Params
) -> None:
  """Checks that an optimiser needs only parameters and their gradient.

  Some optimisers need the loss, or a gradient per example. The check computes nothing.

  Args:
    name: the name of the optimiser.
    optimizer: from `make_optimizer`.
    params: the parameters of the model, or their shapes.

  Raises:
    ValueError: it needs more; the message starts with the config field.
  """

  def update(params):
    return optimizer.update(params, optimizer.init(params), params)[0]

  try:
    updates = jax.eval_shape(update, params)
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (updates, params)]
    if shapes[0] != shapes[1]:
      raise ValueError("its updates have other shapes than the parameters")
    state = jax.eval_shape(optimizer.init, params)
    if any(leaf.size == 0 for leaf in jax.tree.leaves(state)):
      raise ValueError("its state has empty arrays, which checkpoints refuse")
  # An optimiser may raise any exception.
  except Exception as error:
    raise ValueError(
      f"name: {name} cannot update parameters from their gradient and a schedule "
      f"alone: {one_line(error).rstrip('.')}; use another, such as 'adamw'"
    ) from error


def _factory(name: str) -> Callable[..., optax.GradientTransformation]:
  """Finds an optimiser that takes a learning rate, in Optax or by its import path."""
  try:
    factory = resolve(name, _optax_factories(), "factory")
  except ValueError as error:
    raise ValueError(f"name: {error}") from error
  # Some C functions have no signature, and neither do objects that are not callable.
  try:
    parameters = inspect.signature(factory).parameters
  except (TypeError, ValueError):
    parameters = {}
  if "learning_rate" not in parameters:
    raise ValueError(
      f"name: expected a function of a learning_rate, got {name!r}"
    )
  return factory


@functools.cache
def _optax_factories() -> dict[str, Callable[..., Any]]:
  """Returns the optimisers of Optax that take a learning rate, by name."""
  return {
    name: factory
    for module in (optax.contrib, optax)
    for name, factory in vars(module).items()
    if inspect.isfunction(factory)
    and not name.startswith("_")
    and "learning_rate" in inspect.signature(factory).parameters
  }


def _in_float32(
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Makes an optimiser compute in float32, even if parameters have fewer bits.

  In bfloat16, a second moment with b2=0.999 never decreases: a step subtracts a
  thousandth of it, but the next smaller number differs by a 256th.
  """

  def init(params):
    return optimizer.init(float32(params))

  def update(updates, state, params=None):
    return optimizer.update(float32(updates), state, float32(params))

  return optax.GradientTransformation(init, update)


def _decay_mask(params: optax.Params) -> optax.Params:
  """Returns a mask of parameters with weight decay, by the ends of their names."""
  return jax.tree.map_with_path(
    lambda path, _: not f"/{path[-1].key}".endswith(_NOT_DECAYED), params
  )
