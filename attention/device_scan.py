"""What the devices before one have in all: an associative scan over devices."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")


def before(own: T, join: Callable[[T, T], T], nothing: T, axis_name: str) -> T:
  """`own` of all devices before this one, joined, inside `jax.shard_map`.

  Args:
    own: a pytree of arrays, of this device.
    join: `(earlier, later) -> both`, associative.
    nothing: what the first device gets; of the form of `own`.
    axis_name: of the devices.

  Cost: ⌈log₂ D⌉ + 1 messages of the size of `own`: to the devices that are 1, 2, 4, …
  places on, and at last to the next.
  """
  size, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

  def shifted(tree, distance):
    pairs = [(i, i + distance) for i in range(size - distance)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, axis_name, pairs), tree)

  def chosen(condition, one, other):
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), one, other)

  total, distance = own, 1
  while distance < size:
    joined = join(shifted(total, distance), total)
    total = chosen(rank >= distance, joined, total)
    distance *= 2
  return chosen(rank == 0, nothing, shifted(total, 1))
