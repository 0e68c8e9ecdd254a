"""Devices: the one file that knows how many there are and drives them all.

`jit` over a mesh is the default; `pmap` splits rows alone and gives the same
numbers. A device sums numerators and counts of its own rows, these are added
over devices, and the division comes last. What lies where is in `training.devices.mesh`.
"""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

import models
from settings.errors import ConfigError
from training import step as step_lib
from training.config import TrainConfig
from training.devices import cluster
from training.devices import mesh as mesh_lib
from training.devices.mesh import MeshConfig
from training.state import TrainState

AXIS = mesh_lib.DATA
"""Name of the axis that 'pmap' splits rows of a batch along."""


@dataclasses.dataclass(frozen=True)
class Parallel:
  """The programs of a run, and where its arrays lie.

  Attributes:
    mesh: of the devices.
    train: `(numbers, state, batch, step) -> (state, metrics)`, compiled at the first
      call or by `lower`; `state` is donated.
    evaluate: `(variables, batch) -> sums`, likewise.
    shardings: `tree -> where each of its leaves lies`, of a state or shapes of it.
    batch_shardings: `batch -> where each of its arrays lies`; None of 'pmap'.
    place_batch: puts all rows of a batch, or with `batch_size` a process' own rows of
      so many, where `train` and `evaluate` want them.
  """

  mesh: jax.sharding.Mesh
  train: Any
  evaluate: Any
  shardings: Callable[[Any], Any]
  batch_shardings: Callable[[Any], Any] | None
  place_batch: Callable[..., Mapping[str, Any]]

  def placed_shapes(self, shapes: TrainState) -> TrainState:
    """Shapes that say where they will lie; a call finds only such a program."""
    return _placed_shapes(shapes, self.shardings(shapes))

  def batch_shapes(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Likewise of a batch, of 'jit'."""
    assert self.batch_shardings is not None
    return _placed_shapes(dict(batch), self.batch_shardings(batch))

  def place_state(self, state: TrainState) -> TrainState:
    """A copy of a state, each device its part."""
    if cluster.are_several():
      # A restored state lies there already.
      return _put(state, self.shardings(state))
    # Donating what device_put made would delete the array it was made from.
    copy = functools.partial(jax.tree.map, jax.numpy.copy)
    return jax.jit(copy, out_shardings=self.shardings(state))(state)

  def read_batch(
    self, make: Callable[..., Mapping[str, Any]], batch_size: int
  ) -> Mapping[str, Any]:
    """A batch of `make`, placed; of several processes each makes its rows alone.

    Args:
      make: without arguments all rows, or those of some numbers.
      batch_size: of all rows.
    """
    # 'pmap' splits rows that every process has.
    if not cluster.are_several() or self.mesh.axis_names == (AXIS,):
      return self.place_batch(make())
    rows = jax.NamedSharding(self.mesh, jax.P(mesh_lib.ROWS))
    parts = rows.addressable_devices_indices_map((batch_size,)).values()
    numbers = [np.arange(batch_size)[part] for part in parts if part]
    return self.place_batch(
      make(np.unique(np.concatenate(numbers))), batch_size
    )


def check_mesh(
  config: TrainConfig, model: models.Config, devices: int | None = None
) -> MeshConfig:
  """Checks, before anything compiles, that a mesh has these devices and rows.

  Args:
    config: of the run.
    model: of the run.
    devices: how many there are; None is those of JAX.

  Returns:
    The mesh, with a number in place of −1.

  Raises:
    ConfigError: its axes are not the devices, they do not divide the model, or
      `batch_size` is not a multiple of the parts of a batch times micro-batches.
  """
  devices = devices or jax.device_count()
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


# Two, as a comparison measures another program between two runs of one.
@functools.lru_cache(maxsize=2)
def make(
  functions: step_lib.StepFunctions,
  kind: str,
  mesh: MeshConfig = MeshConfig(),  # noqa: B008
  devices: tuple[Any, ...] | None = None,
) -> Parallel:
  """The programs on all devices; equal arguments have the same ones.

  Numbers are the same on any mesh, within rounding. With dropout this holds for
  'jit', whose masks follow from the place in the batch; 'pmap' draws others, of
  the same distribution.

  Args:
    functions: see `StepFunctions`.
    kind: 'jit' or 'pmap'.
    mesh: how devices lie.
    devices: None is those of JAX; 'jit' compiles for others (`training.devices.target`).
  """
  chosen = devices or tuple(jax.devices())
  sizes = mesh_lib.resolve(mesh, len(chosen)).named
  axes = (AXIS,) if kind == "pmap" else mesh_lib.AXES
  laid = jax.make_mesh(
    tuple(sizes[axis] for axis in axes),
    axes,
    # Explicit axes, the default, do not go with Linen's Embed.
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    devices=chosen,
  )
  return (_pmap if kind == "pmap" else _jit)(functions, laid)


def _jit(functions, mesh) -> Parallel:
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
        variables = jax.tree.map(
          _gathered,
          variables,
          shardings(variables, mesh_lib.gathered),
          shardings(variables),
        )
      if sizes[mesh_lib.SEQUENCE] == 1:
        return forward(variables, *arguments)
      return forward(variables, *arguments, mesh=mesh)

    return call

  stateful = functions.forward_and_state
  functions = functions._replace(
    forward=sharded(functions.forward),
    forward_and_state=stateful and sharded(stateful),
  )

  @functools.partial(jax.jit, donate_argnums=1)
  def train(numbers, state, batch, step):
    state, metrics = step_lib.train_step(functions, numbers, state, batch, step)
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

  def batch_shardings(batch):
    return jax.tree.map(sharding_of, dict(batch))

  def place_batch(batch, batch_size=None):
    return _put(dict(batch), batch_shardings(batch), batch_size)

  return Parallel(
    mesh, train, evaluate, shardings, batch_shardings, place_batch
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(variable, whole, part):
  """A variable as a layer computes with it, its gradient as it is kept.

  The gradient of `with_sharding_constraint` would be whole on every device: twice
  the bytes between them, and room for all of it.
  """
  return jax.lax.with_sharding_constraint(variable, whole)


_gathered.defvjp(
  lambda variable, whole, part: (_gathered(variable, whole, part), None),
  lambda whole, part, _, gradient: (
    jax.lax.with_sharding_constraint(gradient, part),
  ),
)


def _pmap(functions, mesh) -> Parallel:
  """A program on each device, which has rows of its own and all parameters."""
  rows = jax.NamedSharding(mesh, jax.P(AXIS))
  reduce = functools.partial(jax.lax.psum, axis_name=AXIS)
  compiled = functools.partial(
    jax.pmap, axis_name=AXIS, out_axes=None, devices=[*mesh.devices.flat]
  )

  def train(*arguments):
    return step_lib.train_step(
      functions,
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

  return Parallel(
    mesh,
    compiled(train, in_axes=(None, None, 0, None), donate_argnums=1),
    compiled(evaluate, in_axes=(None, 0)),
    # It returns P() of what lies whole; a call with another spec compiles anew.
    functools.partial(mesh_lib.shardings, mesh, change=lambda spec: jax.P()),
    None,
    place_batch,
  )


def _placed_shapes(shapes: Any, shardings: Any) -> Any:
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )


def _put(tree: Any, shardings: Any, length: int | None = None) -> Any:
  """Arrays on the devices, each with its part.

  Every process has them as a whole, or with a `length` its own rows of so many.
  """
  if not cluster.are_several():
    return jax.device_put(tree, shardings)

  def put(array, sharding):
    if isinstance(array, jax.Array) and array.sharding == sharding:
      return array
    local = np.asarray(array)
    shape = local.shape if length is None else (length, *local.shape[1:])
    return jax.make_array_from_process_local_data(sharding, local, shape)

  return jax.tree.map(put, tree, shardings)


def to_host(tree: Any) -> Any:
  """NumPy arrays, whole in every process; all have to ask.

  On a CPU they may share the memory of the devices' own.
  """

  def fetch(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return np.asarray(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)

  return jax.tree.map(fetch, tree)
