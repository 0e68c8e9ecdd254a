"""Devices: the one file that knows how many there are and drives them all.

`jit` over a mesh is the default; `pmap` splits rows alone and gives the same
numbers. A device sums numerators and counts of its own rows, these are added
over devices, and the division comes last. What lies where is in `training.mesh`.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any, NamedTuple, cast

import jax
from jax.experimental import multihost_utils
import numpy as np

import models
from settings.errors import ConfigError
from training import cluster
from training import mesh as mesh_lib
from training import step as step_lib
from training.config import TrainConfig
from training.mesh import MeshConfig
from training.state import TrainState

AXIS = mesh_lib.DATA
"""Name of the axis that 'pmap' splits rows of a batch along."""


class Parallel(NamedTuple):
  """The compiled functions of a run.

  Attributes:
    train: `(state, batch, step) -> (state, metrics)`; `state` is donated.
    evaluate: `(variables, batch) -> sums`.
    draw_state: `(draw, seed) -> draw(seed)`, compiled once, each device its part
      of the state.
    place_state: puts a state on every device, as a copy of its own.
    place_batch: puts all rows of a batch where `train` and `evaluate` want them.
    read_batch: `(make, batch_size) -> batch`, placed: `make()` has all rows; of
      several processes each asks `make(numbers)` for those of its devices.
    placed_shapes: a state's shapes -> the same with where each will lie.
    lower_train: `(shapes, batch) -> jax.stages.Lowered`: `train` for states and
      batches of these shapes, placed or not. Once that is compiled, from any
      thread, a first call only runs.
  """

  train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
  evaluate: Callable[..., step_lib.Sums]
  draw_state: Callable[[Callable[[int], TrainState], int], TrainState]
  place_state: Callable[[TrainState], TrainState]
  place_batch: Callable[[Mapping[str, Any]], Mapping[str, Any]]
  read_batch: Callable[..., Mapping[str, Any]]
  placed_shapes: Callable[[TrainState], TrainState]
  lower_train: Callable[..., Any]


def check_mesh(config: TrainConfig, model: models.Config) -> MeshConfig:
  """Checks, before anything compiles, that a mesh has these devices and rows.

  Returns:
    The mesh, with a number in place of −1.

  Raises:
    ConfigError: its axes are not the devices, they do not divide the model, or
      `batch_size` is not a multiple of the parts of a batch times micro-batches.
  """
  devices = jax.device_count()
  try:
    mesh = mesh_lib.resolve(config.mesh, devices)
    mesh_lib.check_model(mesh, model)
  except ValueError as error:
    raise ConfigError(f"config.mesh.{error}") from error
  parts, splits = mesh.data * mesh.fsdp, config.optimizer.accumulate_steps
  if config.batch_size % (parts * splits):
    over = f"{parts} devices"
    if parts != devices:
      over += f" (mesh.data={mesh.data} × mesh.fsdp={mesh.fsdp})"
    raise ConfigError(
      f"config.batch_size: {config.batch_size} rows do not split over "
      f"{over} × {splits} micro-batches; expected a multiple of "
      f"{parts * splits}"
    )
  return mesh


def make(
  functions: step_lib.StepFunctions,
  kind: str,
  devices: list[jax.Device] | None = None,
  mesh: MeshConfig = MeshConfig(),  # noqa: B008
) -> Parallel:
  """Compiles a step for all devices, once for runs that differ in numbers alone.

  Numbers are the same on any mesh, within rounding. With dropout this holds for
  'jit', whose masks follow from the place in the batch; 'pmap' draws others, of
  the same distribution.

  Args:
    functions: see `StepFunctions`; those of a run just before, but for
      `numbers`, have its program.
    kind: 'jit' or 'pmap'.
    devices: default all of them.
    mesh: how they lie.

  Returns:
    See `Parallel`.
  """
  devices = jax.devices() if devices is None else devices
  numbers: Any = functions.numbers
  shared = functions._replace(numbers=cast(Any, None))
  made = _make(shared, kind, tuple(devices), mesh)

  def lower_train(shapes, batch):
    if any(isinstance(array, np.ndarray) for array in batch.values()):
      batch = made.place_batch(batch)
    shapes = made.placed_shapes(shapes)
    return made.lower_train(numbers, shapes, batch, np.int32(0))

  train = functools.partial(made.train, numbers)
  return made._replace(train=train, lower_train=lower_train)


# Two, as a comparison measures another program between two runs of one.
@functools.lru_cache(maxsize=2)
def _make(functions, kind, devices, config) -> Parallel:
  """`train` takes a run's `Numbers` first, and `lower_train` all that it takes."""
  sizes = mesh_lib.resolve(config, len(devices)).named
  # 'pmap' returns P() of what lies whole; a call with another spec compiles anew.
  compiled, axes, change = _jit, mesh_lib.AXES, lambda spec: spec
  if kind == "pmap":
    compiled, axes, change = _pmap, (AXIS,), lambda spec: jax.P()
  mesh = jax.make_mesh(
    tuple(sizes[axis] for axis in axes),
    axes,
    # Explicit axes, the default, do not go with Linen's Embed.
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    devices=devices,
  )

  def shardings(tree):
    return mesh_lib.shardings(mesh, tree, change)

  def placed_shapes(shapes):
    """Shapes that say where they will lie; a call finds only such a program."""
    return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=sharding
      ),
      shapes,
      shardings(shapes),
    )

  @functools.cache
  def drawing(draw):
    shapes = jax.eval_shape(draw, 0)
    return jax.jit(draw, out_shardings=shardings(shapes))

  def place_state(state):
    if cluster.are_several():
      # A restored state lies there already.
      return jax.tree.map(_put, state, shardings(state))
    # Donating what device_put made would delete the array it was made from.
    copy = functools.partial(jax.tree.map, jax.numpy.copy)
    return jax.jit(copy, out_shardings=shardings(state))(state)

  train, evaluate, place_batch, read_batch = compiled(functions, mesh)
  return Parallel(
    train=train,
    evaluate=evaluate,
    draw_state=lambda draw, seed: drawing(draw)(seed),
    place_state=place_state,
    place_batch=place_batch,
    read_batch=read_batch,
    placed_shapes=placed_shapes,
    lower_train=train.lower,
  )


def _jit(functions, mesh) -> tuple[Any, ...]:
  """One program for all devices (GSPMD)."""
  sizes = mesh.shape
  shardings = functools.partial(mesh_lib.shardings, mesh)
  everywhere = jax.NamedSharding(mesh, jax.P())
  rows = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS))
  # Ids, weights and masks [B, T], where 'sequence' divides T.
  stretches = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS, mesh_lib.SEQUENCE))

  def sharded(forward):
    """A forward pass on parts of sequences, its variables whole along 'fsdp'.

    Without the second, XLA may split what a layer computes along its features
    instead of gathering the layer's parameters. When each is gathered is left to
    XLA's scheduler; on a CPU it is at the beginning of a step.
    """

    def call(variables, *arguments):
      if sizes[mesh_lib.FSDP] > 1:
        variables = jax.lax.with_sharding_constraint(
          variables, shardings(variables, mesh_lib.without_fsdp)
        )
      if sizes[mesh_lib.SEQUENCE] == 1:
        return forward(variables, *arguments)
      with models.attention_in_parts(mesh, mesh_lib.SEQUENCE):
        return forward(variables, *arguments)

    return call

  stateful = functions.forward_and_state
  functions = functions._replace(
    forward=sharded(functions.forward),
    forward_and_state=stateful and sharded(stateful),
  )

  @functools.partial(jax.jit, donate_argnums=1)
  def train(numbers, state, batch, step):
    whole = functions._replace(numbers=numbers)
    state, metrics = step_lib.train_step(whole, state, batch, step)
    return (
      jax.lax.with_sharding_constraint(state, shardings(state)),
      jax.lax.with_sharding_constraint(metrics, everywhere),
    )

  @jax.jit
  def evaluate(variables, batch):
    sums = step_lib.eval_step(functions, variables, batch)
    return jax.lax.with_sharding_constraint(sums, everywhere)

  def sharding_of(array):
    positions = array.shape[1] if array.ndim == 2 else 0
    splits = positions and positions % sizes[mesh_lib.SEQUENCE] == 0
    return stretches if splits else rows

  def place_batch(batch, batch_size=None):
    return {
      name: _put(array, sharding_of(array), batch_size)
      for name, array in batch.items()
    }

  def read_batch(make, batch_size):
    if not cluster.are_several():
      return place_batch(make())
    parts = rows.addressable_devices_indices_map((batch_size,)).values()
    numbers = [np.arange(batch_size)[part] for part in parts if part]
    return place_batch(make(np.unique(np.concatenate(numbers))), batch_size)

  return train, evaluate, place_batch, read_batch


def _pmap(functions, mesh) -> tuple[Any, ...]:
  """A program on each device, which has rows of its own and all parameters."""
  rows = jax.NamedSharding(mesh, jax.P(AXIS))
  reduce = functools.partial(jax.lax.psum, axis_name=AXIS)
  compiled = functools.partial(
    jax.pmap, axis_name=AXIS, out_axes=None, devices=[*mesh.devices.flat]
  )

  def train(numbers, *arguments):
    return step_lib.train_step(
      functions._replace(numbers=numbers),
      *arguments,
      reduce=reduce,
      shard=lambda key: jax.random.fold_in(key, jax.lax.axis_index(AXIS)),
    )

  def evaluate(variables, batch):
    return step_lib.eval_step(functions, variables, batch, reduce=reduce)

  def split(array):  # [B, …] to [devices, B/devices, …]
    return array.reshape(mesh.size, -1, *array.shape[1:])

  def place_batch(batch):
    return jax.device_put(jax.tree.map(split, dict(batch)), rows)

  return (
    compiled(train, in_axes=(None, None, 0, None), donate_argnums=1),
    compiled(evaluate, in_axes=(None, 0)),
    place_batch,
    lambda make, batch_size: place_batch(make()),
  )


def _put(
  array: Any, sharding: jax.sharding.Sharding, length: int | None = None
) -> jax.Array:
  """An array on the devices, each with its part.

  Every process has it as a whole, or with a `length` its own rows of so many.
  """
  if isinstance(array, jax.Array) and array.sharding == sharding:
    return array
  if not cluster.are_several():
    return jax.device_put(array, sharding)
  local = np.asarray(array)
  shape = local.shape if length is None else (length, *local.shape[1:])
  return jax.make_array_from_process_local_data(sharding, local, shape)


def to_host(tree: Any) -> Any:
  """NumPy arrays, whole in every process; all have to ask.

  On a CPU they may share the memory of the devices' own.
  """

  def fetch(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return np.asarray(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)

  return jax.tree.map(fetch, tree)
