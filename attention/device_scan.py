"""What the devices before one have in all: an associative scan over devices."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def before(own: T, join: Callable[[T, T], T], nothing: T, axis_name: str) -> T:
  """`own` of all devices before this one, joined.

  Each device sends what it has to the one that is 1, 2, 4, … places on, and at last
  to the next.

  Args:
    own: a pytree of arrays, of this device.
    join: `(earlier, later) -> both`, associative.
    nothing: what the first device gets; of the form of `own`.
    axis_name: of the devices, inside `jax.shard_map`.

  Cost: ⌈log₂ D⌉ + 1 messages of the size of `own`.
  """
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
  found, distance = own, 1
  while distance < size:
    joined = join(_from(found, distance, axis_name), found)
    found = _chosen(rank >= distance, joined, found)
    distance *= 2
  return _chosen(rank == 0, nothing, _from(found, 1, axis_name))


def _from(found: T, distance: int, axis_name: str) -> T:
  """What the device `distance` places before has; zeros where there is none."""
  size = jax.lax.axis_size(axis_name)
  pairs = [(i, i + distance) for i in range(size - distance)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), found)


def _chosen(condition: jax.Array, one: T, other: T) -> T:
  return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)
