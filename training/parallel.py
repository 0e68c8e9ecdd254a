"""Devices: the one file that knows how many there are and drives them all.

`jit` over a mesh is the default; `pmap` splits rows alone and gives the same
numbers. A device sums numerators and counts of its own rows, these are added
over devices, and the division comes last. What lies where is in `training.mesh`.
"""

from collections.abc import Callable, Mapping, Sequence
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
    own_rows: `(batch_size) -> rows`: numbers of the rows of a batch that this
      process's devices have, in order; None where they have all.
    place_batch: puts rows where `train` and `evaluate` want them. All rows, or
      with `(batch, rows, batch_size)` those of `own_rows`.
    to_host: a tree of arrays on the devices -> NumPy, whole in every process;
      all have to ask.
    placed_shapes: a state's shapes -> the same with where each will lie.
    lower_train: `(shapes, batch) -> jax.stages.Lowered`: `train` for states and
      batches of these shapes, placed or not. Once that is compiled, from any thread, a first
      call only runs.
  """

  train: Callable[..., tuple[TrainState, dict[str, jax.Array]]]
  evaluate: Callable[..., step_lib.Sums]
  draw_state: Callable[[Callable[[int], TrainState], int], TrainState]
  place_state: Callable[[TrainState], TrainState]
  own_rows: Callable[[int], np.ndarray | None]
  place_batch: Callable[..., Mapping[str, Any]]
  to_host: Callable[[Any], Any]
  placed_shapes: Callable[[TrainState], TrainState]
  lower_train: Callable[..., Any]


def check_mesh(config: TrainConfig, model: models.Config) -> MeshConfig:
  """Checks, before anything compiles, that a mesh has these devices and rows.

  Args:
    config: of the run.
    model: its model's config.

  Returns:
    The mesh, with a number in place of −1.

  Raises:
    ConfigError: its axes are not the devices, they do not divide the model, or
      `batch_size` is not a multiple of the parts of a batch times micro-batches.
  """
  devices = jax.device_count()
  try:
    found = mesh_lib.resolve(config.mesh, devices)
    mesh_lib.check_model(found, model)
  except ValueError as error:
    raise ConfigError(f"config.mesh.{error}") from error
  parts, splits = found.data * found.fsdp, config.optimizer.accumulate_steps
  if config.batch_size % (parts * splits):
    over = f"{parts} devices"
    if parts != devices:
      over += f" (mesh.data={found.data} × mesh.fsdp={found.fsdp})"
    raise ConfigError(
      f"config.batch_size: {config.batch_size} rows do not split over "
      f"{over} × {splits} micro-batches; expected a multiple of "
      f"{parts * splits}"
    )
  return found


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
    mesh: how they lie, for 'jit'.

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
def _make(functions, kind, devices, mesh) -> Parallel:
  """`train` takes a run's `Numbers` first, and `lower_train` all that it takes."""
  if kind == "jit":
    return _on_mesh(functions, mesh_lib.resolve(mesh, len(devices)), devices)
  return _on_each(functions, devices)


def _on_mesh(
  functions: step_lib.StepFunctions,
  config: MeshConfig,
  devices: Sequence[jax.Device],
) -> Parallel:
  """One program for all devices (GSPMD)."""
  mesh = jax.make_mesh(
    config.sizes,
    mesh_lib.AXES,
    # Explicit axes, the default, do not go with Linen's Embed.
    axis_types=(jax.sharding.AxisType.Auto,) * len(mesh_lib.AXES),
    devices=devices,
  )
  sizes = dict(mesh.shape)
  rows = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS))
  # Ids, weights and masks [B, T], where 'sequence' divides T.
  stretches = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS, mesh_lib.SEQUENCE))

  def lying(tree, change=lambda spec: spec):
    """The sharding of every leaf, by the rules."""
    specs = mesh_lib.specs(tree, sizes)
    return jax.tree.map(
      lambda spec: jax.NamedSharding(mesh, change(spec)), specs
    )

  def gathered(forward):
    """A forward pass on variables that are whole along 'fsdp'.

    Without this, XLA may split what a layer computes along its features instead
    of gathering the layer's parameters. When each is gathered is left to XLA's
    scheduler; on a CPU it is at the beginning of a step.
    """
    if config.fsdp == 1:
      return forward

    def call(variables, *arguments):
      whole = lying(variables, mesh_lib.without_fsdp)
      variables = jax.lax.with_sharding_constraint(variables, whole)
      return forward(variables, *arguments)

    return call

  def in_parts(forward):
    """A forward pass whose attention is computed where its positions are."""
    if config.sequence == 1:
      return forward

    def call(*arguments):
      with models.attention_in_parts(mesh, mesh_lib.SEQUENCE):
        return forward(*arguments)

    return call

  with_state = functions.forward_and_state
  functions = functions._replace(
    forward=in_parts(gathered(functions.forward)),
    forward_and_state=with_state and in_parts(gathered(with_state)),
  )

  def train(numbers, state, batch, step):
    whole = functions._replace(numbers=numbers)
    state, metrics = step_lib.train_step(whole, state, batch, step)
    return (
      jax.lax.with_sharding_constraint(state, lying(state)),
      jax.lax.with_sharding_constraint(metrics, everywhere),
    )

  train = jax.jit(train, donate_argnums=1)

  everywhere = jax.NamedSharding(mesh, jax.P())

  def evaluate(variables, batch):
    sums = step_lib.eval_step(functions, variables, batch)
    return jax.lax.with_sharding_constraint(sums, everywhere)

  def place_state(state):
    if cluster.are_several():
      # A restored state lies there already.
      return jax.tree.map(_put, state, lying(state))
    # Donating what device_put made would delete the array it was made from.
    copy = jax.jit(
      lambda state: jax.tree.map(jax.numpy.copy, state),
      out_shardings=lying(state),
    )
    return copy(state)

  def own_rows(batch_size):
    if not cluster.are_several():
      return None
    parts = rows.addressable_devices_indices_map((batch_size,)).values()
    numbers = [np.arange(batch_size)[part] for part in parts if part]
    return np.unique(np.concatenate(numbers))

  def place_batch(batch, own=None, batch_size=0):
    def place(array):
      positions = array.shape[1] if array.ndim == 2 else 0
      splits = positions and positions % config.sequence == 0
      sharding = stretches if splits else rows
      if own is None:
        return _put(array, sharding)
      return jax.make_array_from_callback(
        (batch_size, *array.shape[1:]),
        sharding,
        lambda part: array[
          (np.isin(own, np.arange(batch_size)[part[0]]), *part[1:])
        ],
      )

    return {name: place(array) for name, array in batch.items()}

  def placed_shapes(shapes):
    return _placed(shapes, lying(shapes))

  return Parallel(
    train=train,
    evaluate=jax.jit(evaluate),
    draw_state=_drawing(placed_shapes),
    place_state=place_state,
    own_rows=own_rows,
    place_batch=place_batch,
    to_host=_to_host,
    placed_shapes=placed_shapes,
    lower_train=train.lower,
  )


def _on_each(
  functions: step_lib.StepFunctions, devices: Sequence[jax.Device]
) -> Parallel:
  """A program on each device, which has rows of its own and all parameters."""
  mesh = jax.make_mesh(
    (len(devices),),
    (AXIS,),
    axis_types=(jax.sharding.AxisType.Auto,),
    devices=devices,
  )
  everywhere = jax.NamedSharding(mesh, jax.P())
  rows = jax.NamedSharding(mesh, jax.P(AXIS))
  reduce = functools.partial(jax.lax.psum, axis_name=AXIS)

  def split(array):  # [B, …] to [devices, B/devices, …]
    return array.reshape(len(devices), -1, *array.shape[1:])

  def place_batch(batch):
    parts = {name: split(array) for name, array in batch.items()}
    return jax.device_put(parts, rows)

  def train(numbers, *arguments):
    return step_lib.train_step(
      functions._replace(numbers=numbers),
      *arguments,
      reduce=reduce,
      shard=lambda key: jax.random.fold_in(key, jax.lax.axis_index(AXIS)),
    )

  train = jax.pmap(
    train,
    axis_name=AXIS,
    in_axes=(None, None, 0, None),
    out_axes=None,
    devices=devices,
    donate_argnums=1,
  )

  def placed_shapes(shapes):
    return _placed(shapes, jax.tree.map(lambda _: everywhere, shapes))

  return Parallel(
    train=train,
    evaluate=jax.pmap(
      functools.partial(step_lib.eval_step, functions, reduce=reduce),
      axis_name=AXIS,
      in_axes=(None, 0),
      out_axes=None,
      devices=devices,
    ),
    draw_state=_drawing(placed_shapes),
    # Donating what device_put made would delete the array it was made from.
    place_state=jax.jit(
      lambda state: jax.tree.map(jax.numpy.copy, state),
      out_shardings=everywhere,
    ),
    own_rows=lambda batch_size: None,
    place_batch=place_batch,
    to_host=_to_host,
    placed_shapes=placed_shapes,
    lower_train=train.lower,
  )


def _put(array: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """An array that every process has as a whole, each device with its part."""
  if isinstance(array, jax.Array) and array.sharding == sharding:
    return array
  if not cluster.are_several():
    return jax.device_put(array, sharding)
  whole = np.asarray(array)
  return jax.make_array_from_callback(
    whole.shape, sharding, lambda part: whole[part]
  )


def _to_host(tree: Any) -> Any:
  """NumPy arrays, which on a CPU may share the memory of the devices' own."""

  def fetch(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return np.asarray(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)

  return jax.tree.map(fetch, tree)


def _drawing(placed_shapes: Callable[[Any], Any]) -> Callable[..., TrainState]:
  """`Parallel.draw_state`, which keeps what it compiled."""

  @functools.cache
  def compiled(draw):
    placed = placed_shapes(jax.eval_shape(draw, 0))
    return jax.jit(
      draw, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, placed)
    )

  return lambda draw, seed: compiled(draw)(seed)


def _placed(shapes: Any, shardings: Any) -> Any:
  """Shapes that say where they will lie; a call finds only such a program."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )
