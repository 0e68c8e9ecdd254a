"""Places the state and the batches of a run on a mesh of devices.

`jit` over a mesh is the default. `pmap` splits only rows, and computes the same numbers
except for the masks of dropout and the load-balance loss of experts, which each device
computes for its own rows.
`training.devices.mesh` defines the sharding of each variable.
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
from training.devices import mesh as mesh_lib
from training.devices.mesh import MeshConfig
from training.state import TrainState

AXIS = mesh_lib.DATA
"""The axis along which 'pmap' splits the rows of a batch."""


def check_mesh(
  config: TrainConfig, model: models.Config, devices: int | None = None
) -> MeshConfig:
  """Checks, before anything is compiled, that a mesh fits the devices and the batch.

  Args:
    config: the config of the run.
    model: the config of the model.
    devices: the number of devices; None is the number of JAX's devices.

  Returns:
    The mesh, with −1 replaced by a number.

  Raises:
    ConfigError: the product of the axes is not the number of devices, an axis does
      not divide the model, or `batch_size` is not a multiple of the shards of a
      batch times the micro-batches.
  """
  devices = devices or jax.device_count()
  try:
    mesh = mesh_lib.resolve(config.mesh, devices)
    mesh_lib.check_model(mesh, model)
  except ValueError as error:
    raise ConfigError(f"config.mesh.{error}") from error
  shards, splits = mesh.data * mesh.fsdp, config.optimizer.accumulate_steps
  if config.batch_size % (shards * splits):
    axes = ""
    if shards != devices:
      axes = f" (mesh.data={mesh.data} × mesh.fsdp={mesh.fsdp})"
    raise ConfigError(
      f"config.batch_size: {config.batch_size} rows do not split over "
      f"{shards} devices{axes} × {splits} micro-batches; expected a multiple of "
      f"{shards * splits}"
    )
  return mesh


def make_mesh(
  config: TrainConfig, devices: Sequence[Any] = ()
) -> jax.sharding.Mesh:
  """Creates the mesh of a run: the axes of its config, or only `AXIS` for 'pmap'.

  Args:
    config: the config of the run.
    devices: the devices; empty means the devices of JAX.
  """
  devices = devices or jax.devices()
  sizes = mesh_lib.resolve(config.mesh, len(devices)).axis_sizes
  axes = (AXIS,) if config.parallel == "pmap" else mesh_lib.AXES
  return jax.make_mesh(
    tuple(sizes[axis] for axis in axes),
    axes,
    # Linen's Embed does not support explicit axes, the default.
    axis_types=(jax.sharding.AxisType.Auto,) * len(axes),
    devices=devices,
  )


def sequence_sharded(mesh: jax.sharding.Mesh, model: Any) -> Any:
  """Returns the model with attention on sequence shards, if the mesh has any."""
  if mesh.shape.get(mesh_lib.SEQUENCE, 1) == 1:
    return model
  return models.sequence_sharded(model, mesh, mesh_lib.SEQUENCE)


def gather(mesh: jax.sharding.Mesh, variables: Any) -> Any:
  """Gathers variables that the mesh shards along 'fsdp', for a forward pass.

  Otherwise, XLA may split a layer's computation along its features instead of gathering
  its parameters. XLA's scheduler decides when it gathers each variable; on a CPU, it
  does so at the beginning of a step.
  """
  if mesh.shape.get(mesh_lib.FSDP, 1) == 1:
    return variables
  return jax.tree.map(
    _gather,
    variables,
    mesh_lib.shardings(mesh, variables, mesh_lib.without_fsdp),
    mesh_lib.shardings(mesh, variables),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(variable, gathered, stored):
  """Gathers a variable; its gradient is sharded as the variable is stored.

  The gradient of `with_sharding_constraint` would be whole on every device, which takes
  twice the communication, and the memory of the whole gradient.
  """
  return jax.lax.with_sharding_constraint(variable, gathered)


_gather.defvjp(
  lambda variable, gathered, stored: (
    _gather(variable, gathered, stored),
    None,
  ),
  lambda gathered, stored, _, gradient: (
    jax.lax.with_sharding_constraint(gradient, stored),
  ),
)


def shardings(mesh: jax.sharding.Mesh, tree: Any) -> Any:
  """Returns the sharding of each leaf of a state, given the state or its shapes."""
  if mesh.axis_names == (AXIS,):
    # `pmap` returns P() for replicated arrays; a call with another spec recompiles.
    return mesh_lib.shardings(mesh, tree, change=lambda spec: jax.P())
  return mesh_lib.shardings(mesh, tree)


def batch_shardings(mesh: jax.sharding.Mesh, batch: Mapping[str, Any]) -> Any:
  """Returns the sharding of each array of a batch, for 'jit'."""
  rows = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS))
  # For ids, weights and masks [B, T], if 'sequence' divides T.
  sequences = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS, mesh_lib.SEQUENCE))

  def sharding(array):
    positions = array.shape[1] if array.ndim == 2 else 0
    divides = positions and positions % mesh.shape[mesh_lib.SEQUENCE] == 0
    return sequences if divides else rows

  return jax.tree.map(sharding, dict(batch))


def with_shardings(shapes: Any, shardings: Any) -> Any:
  """Adds shardings to shapes, so that a step compiles without arrays."""
  return jax.tree.map(
    lambda leaf, sharding: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    shapes,
    shardings,
  )


def place_state(mesh: jax.sharding.Mesh, state: TrainState) -> TrainState:
  """Copies a state to the devices, sharded over the mesh."""
  if jax.process_count() > 1:
    # A restored state is already on the devices.
    return _put(state, shardings(mesh, state))
  # The result of device_put may share memory with the original, which donation would
  # free.
  copy = functools.partial(jax.tree.map, jax.numpy.copy)
  return jax.jit(copy, out_shardings=shardings(mesh, state))(state)


def place_batch(
  mesh: jax.sharding.Mesh,
  batch: Mapping[str, Any],
  batch_size: int | None = None,
) -> Mapping[str, Any]:
  """Copies a batch to the devices, sharded over the mesh as the steps expect.

  Args:
    mesh: from `make_mesh`.
    batch: all rows, or with `batch_size` the rows of this process.
    batch_size: the total number of rows.
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
  """Reads a batch and places it; each process reads only its own rows.

  Args:
    mesh: from `make_mesh`.
    make: returns all rows, or with an argument the rows of these indices.
    batch_size: the total number of rows.
  """
  # With 'pmap', every process reads all rows.
  if jax.process_count() == 1 or mesh.axis_names == (AXIS,):
    return place_batch(mesh, make())
  rows = jax.NamedSharding(mesh, jax.P(mesh_lib.ROWS))
  slices = rows.addressable_devices_indices_map((batch_size,)).values()
  numbers = [np.arange(batch_size)[index] for index in slices if index]
  return place_batch(mesh, make(np.unique(np.concatenate(numbers))), batch_size)


def _put(tree: Any, shardings: Any, length: int | None = None) -> Any:
  """Copies arrays to the devices with the given shardings.

  Every process has the whole arrays, or with `length`, the total number of rows, only
  its own rows.
  """
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def put(array, sharding):
    if isinstance(array, jax.Array) and array.sharding == sharding:
      return array
    local = np.asarray(array)
    shape = local.shape if length is None else (length, *local.shape[1:])
    return jax.make_array_from_process_local_data(sharding, local, shape)

  return jax.tree.map(put, tree, shardings)


def to_host(tree: Any) -> Any:
  """Returns whole NumPy arrays in every process; all processes must call this function.

  On a CPU, they may share memory with the arrays on the devices.
  """

  def fetch(leaf):
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
      return np.asarray(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)

  return jax.tree.map(fetch, tree)
