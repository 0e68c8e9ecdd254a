"""What neighbouring devices have of a sequence in parts, one part a device."""

import jax
import jax.numpy as jnp
from jaxtyping import Shaped


def reached(
  x: Shaped[jax.Array, "B T *A"], left: int, right: int, axis_name: str
) -> Shaped[jax.Array, "B U *A"]:
  """This device's positions, with those before and behind them.

  Args:
    x: this device's T positions, which follow those of the device before.
    left: positions to get from before, from as many devices as that takes.
    right: positions to get from behind.
    axis_name: of the devices, inside `jax.shard_map`.

  Returns:
    U = left + T + right positions, zeros where the sequence has none. What crosses
    is left + right positions.
  """
  before = _of_others(x, left, 1, axis_name)
  behind = _of_others(x, right, -1, axis_name)
  return jnp.concatenate([*reversed(before), x, *behind], axis=1)


def _of_others(x, width, direction, axis_name):
  """The nearest `width` positions on one side, the nearest device's first.

  `direction` is 1 for the devices before this one, −1 for those behind it.
  """
  size = jax.lax.axis_size(axis_name)
  found, hop = [], 0
  while width > 0:
    hop += 1
    taken = min(width, x.shape[1])
    sent = x[:, -taken:] if direction == 1 else x[:, :taken]
    width -= taken
    if hop >= size:
      found.append(jnp.zeros_like(sent))
      continue
    pairs = [
      (i, i + direction * hop)
      for i in range(size)
      if 0 <= i + direction * hop < size
    ]
    found.append(jax.lax.ppermute(sent, axis_name, pairs))
  return found
