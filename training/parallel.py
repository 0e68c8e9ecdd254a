"""Devices: the one file that knows how many there are and drives them all.

`jit` over a mesh with one axis is the default; `pmap` gives the same numbers.
Rows of a batch are split over devices, the state is on every one. In both, a
device sums numerators and counts of its own rows, these are added over
devices, and the division comes last.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple

import jax
import numpy as np

from process.errors import ConfigError
from training import step as step_lib
from training.config import TrainConfig
from training.state import TrainState

AXIS = "data"
"""Name of the axis that rows of a batch are split along."""


class Parallel(NamedTuple):
  """The compiled functions of a run.

  Attributes:
    train: `(state, batch, step) -> (state, metrics)`; `state` is donated.
    evaluate: `(variables, batch) -> sums`.
    place_state: puts a state on every device, as a copy of its own.
    place_batch: puts rows where `train` and `evaluate` want them.
    compile_train: `(shapes, batch) -> None`: compiles `train` for states and
      batches of these shapes, so that its first call only runs; from any
      thread.
  """

  train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
  evaluate: Callable[..., step_lib.Sums]
  place_state: Callable[[TrainState], TrainState]
  place_batch: Callable[[Mapping[str, np.ndarray]], Mapping[str, Any]]
  compile_train: Callable[[TrainState, Mapping[str, np.ndarray]], None]


def check_batch_size(config: TrainConfig) -> None:
  """Checks, before anything compiles, that rows split evenly over devices.

  Raises:
    ConfigError: `batch_size` is not a multiple of devices times micro-batches.
  """
  devices = jax.device_count()
  splits = config.optimizer.accumulate_steps
  if config.batch_size % (devices * splits):
    raise ConfigError(
      f"config.batch_size: {config.batch_size} rows do not split over "
      f"{devices} devices × {splits} micro-batches; expected a multiple of "
      f"{devices * splits}"
    )


def make(
  functions: step_lib.StepFunctions,
  kind: str,
  devices: list[jax.Device] | None = None,
) -> Parallel:
  """Compiles a step for all devices.

  Without dropout 'jit' and 'pmap' give the same numbers on any number of
  devices. With it they draw other masks, of the same distribution.

  Args:
    functions: see `StepFunctions`.
    kind: 'jit' or 'pmap'.
    devices: default all of them.

  Returns:
    See `Parallel`.
  """
  devices = jax.devices() if devices is None else devices
  mesh = jax.make_mesh(
    (len(devices),),
    (AXIS,),
    # Explicit axes, the default, do not go with Linen's Embed.
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=devices,
  )
  everywhere = jax.NamedSharding(mesh, jax.P())
  rows = jax.NamedSharding(mesh, jax.P(AXIS))
  # Donating what device_put made would delete the array it was made from.
  place_state = jax.jit(
    lambda state: jax.tree.map(jax.numpy.copy, state),
    out_shardings=everywhere,
  )

  def parallel(train, evaluate, place_batch):
    def compile_train(shapes, batch):
      # A call finds the program only where the shapes say where they will lie.
      state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=everywhere
        ),
        shapes,
      )
      train.lower(state, place_batch(batch), np.int32(0)).compile()

    return Parallel(train, evaluate, place_state, place_batch, compile_train)

  if kind == "jit":
    return parallel(
      train=jax.jit(
        functools.partial(step_lib.train_step, functions),
        in_shardings=(everywhere, rows, None),
        out_shardings=everywhere,
        donate_argnums=0,
      ),
      evaluate=jax.jit(
        functools.partial(step_lib.eval_step, functions),
        in_shardings=(everywhere, rows),
        out_shardings=everywhere,
      ),
      place_batch=lambda batch: jax.device_put(dict(batch), rows),
    )

  reduce = functools.partial(jax.lax.psum, axis_name=AXIS)

  def split(array):  # [B, …] to [devices, B/devices, …]
    return array.reshape(len(devices), -1, *array.shape[1:])

  return parallel(
    train=jax.pmap(
      functools.partial(
        step_lib.train_step,
        functions,
        reduce=reduce,
        shard=lambda key: jax.random.fold_in(key, jax.lax.axis_index(AXIS)),
      ),
      axis_name=AXIS,
      in_axes=(None, 0, None),
      out_axes=None,
      devices=devices,
      donate_argnums=0,
    ),
    evaluate=jax.pmap(
      functools.partial(step_lib.eval_step, functions, reduce=reduce),
      axis_name=AXIS,
      in_axes=(None, 0),
      out_axes=None,
      devices=devices,
    ),
    place_batch=lambda batch: jax.device_put(
      {name: split(array) for name, array in batch.items()}, rows
    ),
  )
