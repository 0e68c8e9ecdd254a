"""Mini-batches of positions whose gradients are taken at one state."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Minibatches(NamedTuple):
  """The mini-batches of a sequence.

  Attributes:
    place: the number of earlier positions of the same mini-batch.
    opens: whether a mini-batch starts at the position and its segment does not.
    count: the number of positions of the last mini-batch.
  """

  place: Int[Array, "B T"]
  opens: Bool[Array, "B T"]
  count: Int[Array, "B"]


def minibatches(
  keep: Bool[Array, "B T"],
  begins: Bool[Array, "B T"],
  count: Int[Array, "B"],
  size: int,
) -> Minibatches:
  """Divides the visible positions of each segment into mini-batches of `size`.

  Args:
    keep: visible positions; others are in no mini-batch.
    begins: where a segment starts.
    count: positions of a mini-batch that earlier calls have begun, at most `size`.
    size: C. Only the last mini-batch of a segment may be shorter.
  """
  earlier = jnp.cumsum(keep, axis=1, dtype=jnp.int32) - keep
  first = jnp.where(begins, earlier, -count[:, None])
  number = earlier - jax.lax.cummax(first, axis=1)
  total = number[:, -1] + keep[:, -1]
  count = jnp.where(total > 0, (total - 1) % size + 1, 0)
  place = number % size
  return Minibatches(place, keep & (place == 0) & (number > 0), count)
