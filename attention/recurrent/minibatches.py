"""Mini-batches of positions whose gradients are taken at one state."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.recurrent.packing import visible_positions


class Minibatches(NamedTuple):
  """The mini-batches of a sequence.

  Attributes:
    keep: visible positions; others are in no mini-batch.
    begins: where a segment starts.
    opens: where a mini-batch starts and no segment does.
    place: the number of earlier positions of the same mini-batch.
    count: the number of positions of the last mini-batch.
  """

  keep: Bool[Array, "B T"]
  begins: Bool[Array, "B T"]
  opens: Bool[Array, "B T"]
  place: Int[Array, "B T"]
  count: Int[Array, "B"]


def minibatches(
  query: Float[Array, "B T N H"],
  mask: Bool[Array, "..."] | None,
  begins: Bool[Array, "B T 1 1"] | None,
  count: Int[Array, "B"],
  size: int,
) -> Minibatches:
  """Divides the visible positions of each segment into mini-batches.

  Args:
    query: an array with the shape of the queries.
    mask: key mask; None hides nothing.
    begins: where a segment starts; None is nowhere.
    count: positions of a mini-batch that an earlier call has begun, at most `size`.
    size: C. Only the last mini-batch of a segment may be shorter.
  """
  shape = query.shape[:2]
  keep = checks.key_mask(mask, query, query)
  keep = jnp.ones(shape, bool) if keep is None else keep
  starts = jnp.zeros(shape, bool) if begins is None else begins[..., 0, 0]
  number, total = visible_positions(keep, begins, count)
  total = total[:, -1]
  count = jnp.where(total > 0, (total - 1) % size + 1, 0)
  place = number % size
  opens = keep & (place == 0) & (number > 0)
  return Minibatches(keep, starts, opens, place, count)
