"""The mesh of a run, and its state and batches on the devices of that mesh.

`jit` over a mesh is the default; `pmap` splits rows alone and gives the same
numbers. How each variable is sharded is in `training.devices.mesh`.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
from typing import Any

import jax
from jax.experimental import multihost_utils
import numpy as np

import models
from settings.errors import ConfigError
from training.config import TrainConfig
from training.devices import cluster
from training.devices import mesh as mesh_lib
from training.devices.mesh import MeshConfig
from training.state import TrainState

AXIS = mesh_lib.DATA
"""Name of the axis that 'pmap' splits rows of a batch along."""


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


def make_mesh(
  config: TrainConfig, devices: Sequence[Any] = ()
) -> jax.sharding.Mesh:
  """The devices of a run along the axes of its config; of 'pmap', along `AXIS`.

  Args:
    config: of the run.
    devices: none is those of JAX.
  """
  devices = devices or jax.devices()
  sizes = mesh_lib.resolve(config.mesh, len(devices)).named
  axes = (AXIS,) if config.parallel == "pmap" else mesh_lib.AXES
  return jax.make_mesh(
    tuple(sizes[axis] for axis in axes),
    axes,
    # Explicit axes, the default, do not go with Linen's Embed.
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    devices=devices,
  )


def on_mesh(
  mesh: jax.sharding.Mesh, forward: Callable[..., Any], model: Any
) -> Callable[..., Any]:
  """A forward pass on sequence shards, its variables gathered along 'fsdp'.

  Without the second, XLA may split what a layer computes along its features
  instead of gathering the layer's parameters. When each is gathered is left to
  XLA's scheduler; on a CPU it is at the beginning of a step.

  Args:
    mesh: from `make_mesh`.
    forward: `(model, variables, …) -> …`.
    model: its first argument.

  Returns:
    `(variables, …) -> …`.
  """
  if mesh.shape.get(mesh_lib.SEQUENCE, 1) > 1:
    model = models.sequence_sharded(model, mesh, mesh_lib.SEQUENCE)

  def call(variables, *arguments, **options):
    if mesh.shape.get(mesh_lib.FSDP, 1) > 1:
      variables = jax.tree.map(
        _gathered,
        variables,
        mesh_lib.shardings(mesh, variables, mesh_lib.gathered),
        mesh_lib.shardings(mesh, variables),
      )
    return forward(model, variables, *arguments, **options)

  return call


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


def shardings(mesh: jax.sharding.Mesh, tree: Any) -> Any:
  """The sharding of each leaf of a state, or of shapes of it."""
  if mesh.axis_names == (AXIS,):
    # `pmap` returns P() for what is whole; a call with another spec compiles anew.
    return mesh_lib.shardings(mesh, tree, change=lambda spec: jax.P())
  return mesh_lib.shardings(mesh, tree)


def batch_shardings(mesh: jax.sharding.Mesh, batch: Mapping[str, Any]) -> Any:
  """The sharding of each array of a batch, for 'jit'."""
  rows = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS))
  # Ids, weights and masks [B, T], where 'sequence' divides T.
  sequences = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS, mesh_lib.SEQUENCE))

  def sharding(array):
    positions = array.shape[1] if array.ndim == 2 else 0
    divides = positions and positions % mesh.shape[mesh_lib.SEQUENCE] == 0
    return sequences if divides else rows

  return jax.tree.map(sharding, dict(batch))


def with_shardings(shapes: Any, shardings: Any) -> Any:
  """Shapes with shardings, from which a step compiles without any array."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )


def place_state(mesh: jax.sharding.Mesh, state: TrainState) -> TrainState:
  """A copy of a state, sharded over the mesh."""
  if cluster.are_several():
    # A restored state lies there already.
    return _put(state, shardings(mesh, state))
  # Donating what device_put made would delete the array it was made from.
  copy = functools.partial(jax.tree.map, jax.numpy.copy)
  return jax.jit(copy, out_shardings=shardings(mesh, state))(state)


def place_batch(
  mesh: jax.sharding.Mesh,
  batch: Mapping[str, Any],
  batch_size: int | None = None,
) -> Mapping[str, Any]:
  """A batch, sharded over the mesh as the steps read it.

  Args:
    mesh: from `make_mesh`.
    batch: all rows, or with `batch_size` those of this process.
    batch_size: number of all rows.
  """
  if mesh.axis_names != (AXIS,):
    return _put(dict(batch), batch_shardings(mesh, batch), batch_size)

  def split(array):  # [B, …] to [devices, B/devices, …]
    return array.reshape(mesh.size, -1, *array.shape[1:])

  rows = jax.NamedSharding(mesh, jax.P(AXIS))
  return jax.device_put(jax.tree.map(split, dict(batch)), rows)


def read_batch(
  mesh: jax.sharding.Mesh,
  make: Callable[..., Mapping[str, Any]],
  batch_size: int,
) -> Mapping[str, Any]:
  """A batch of `make`, placed; of several processes each makes its rows alone.

  Args:
    mesh: from `make_mesh`.
    make: without arguments all rows, or those of some numbers.
    batch_size: of all rows.
  """
  # 'pmap' splits rows that every process has.
  if not cluster.are_several() or mesh.axis_names == (AXIS,):
    return place_batch(mesh, make())
  rows = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS))
  parts = rows.addressable_devices_indices_map((batch_size,)).values()
  numbers = [np.arange(batch_size)[part] for part in parts if part]
  return place_batch(mesh, make(np.unique(np.concatenate(numbers))), batch_size)


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
