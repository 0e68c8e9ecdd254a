"""Mini-batches of positions whose gradients are evaluated at one state."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.recurrent.packing import visible_positions


class Minibatches(NamedTuple):
  """The mini-batches of a sequence.

  Attributes:
    keep: the unmasked positions; others are in no mini-batch.
    segment_starts: whether a segment starts at a position.
    starts: whether a mini-batch, but no segment, starts at a position.
    offset: the number of earlier positions of the same mini-batch.
    count: the number of positions of the last mini-batch.
  """

  keep: Bool[Array, "B T"]
  segment_starts: Bool[Array, "B T"]
  starts: Bool[Array, "B T"]
  offset: Int[Array, "B T"]
  count: Int[Array, "B"]


def minibatches(
  query: Float[Array, "B T N H"],
  mask: Bool[Array, "..."] | None,
  segment_starts: Bool[Array, "B T 1 1"] | None,
  count: Int[Array, "B"],
  size: int,
) -> Minibatches:
  """Divides the unmasked positions of each segment into mini-batches.

  Args:
    query: an array with the shape of the queries.
    mask: key mask; None masks nothing.
    segment_starts: whether a segment starts at a position; None if none does.
    count: the number of positions, at most `size`, in the last mini-batch of the
      previous call.
    size: C. Only the last mini-batch of a segment may be shorter.
  """
  shape = query.shape[:2]
  keep = checks.key_mask(mask, query, query)
  keep = jnp.ones(shape, bool) if keep is None else keep
  if segment_starts is None:
    first = jnp.zeros(shape, bool)
  else:
    first = segment_starts[..., 0, 0]
  number, total = visible_positions(keep, segment_starts, count)
  total = total[:, -1]
  count = jnp.where(total > 0, (total - 1) % size + 1, 0)
  offset = number % size
  starts = keep & (offset == 0) & (number > 0)
  return Minibatches(keep, first, starts, offset, count)
