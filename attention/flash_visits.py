"""How the loops of `flash_attention` walk over blocks of queries and of keys."""

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import blocks
from attention.flash_scores import Keys, Limits, Operands, Queries, Settings

T = TypeVar("T")


def read_queries(settings: Settings, operands: Operands, i: Array) -> Queries:
  """The block of queries of number `i`, heads first."""
  start = jnp.minimum(
    i * settings.rows, operands.query.shape[1] - settings.rows
  )
  query = blocks.cut(operands.query, start, settings.rows)
  return Queries(i, start, blocks.heads_first(query, operands.key.shape[2]))


def read_keys(
  settings: Settings, operands: Operands, limits: Limits, keys: Keys
) -> tuple[Float[Array, "A D H"], Float[Array, "A D V"]]:
  """A block of keys and values, heads first; zeros where a key mask hides them.

  So not even a NaN that stands in padding gets through.
  """
  arrays = [
    blocks.cut(x, keys.start, settings.width)
    for x in (operands.key, operands.value)
  ]
  mask = limits.mask
  if mask is not None and mask.shape[1] == mask.shape[2] == 1:
    if mask.shape[3] > 1:
      mask = blocks.cut(mask, keys.start, settings.width, axis=3)
    arrays = [jnp.where(mask[:, 0, 0, :, None, None], x, 0) for x in arrays]
  key, value = (blocks.heads_first(x, x.shape[2]) for x in arrays)
  return jax.lax.optimization_barrier((key, value))


def over_keys(
  settings: Settings,
  operands: Operands,
  limits: Limits,
  queries: Queries,
  step: Callable[[Keys, bool, T], T],
  carry: T,
  is_needed: Bool[Array, ""] | None = None,
) -> T:
  """Runs `step(keys, is_masked, carry)` over the key blocks that are seen.

  Where only causality or the ragged end limits, the first blocks need no mask.
  `is_needed`, where given, says whether to run at all; it is an exception then,
  and every block gets the mask, which saves compiling the step twice.
  """
  source_length = operands.key.shape[1]
  width = settings.width

  def visit(is_masked, j, carry):
    fresh = j * width
    start = jnp.minimum(fresh, source_length - width)
    return step(Keys(j, start, fresh), is_masked, carry)

  # A loop that would have no round is left out: it would be compiled as well.
  seen, whole = source_length, source_length // width
  if settings.is_causal:
    seen = jnp.minimum(seen, queries.start + settings.rows)
    whole = jnp.minimum(whole, (queries.start + 1) // width)
  end = (seen + width - 1) // width
  if is_needed is not None:
    end, whole = jnp.where(is_needed, end, 0), 0
  elif limits.hides:
    whole = 0
  else:
    carry = jax.lax.fori_loop(0, whole, partial(visit, False), carry)
    if not settings.is_causal and source_length % width == 0:
      return carry
  return jax.lax.fori_loop(whole, end, partial(visit, True), carry)
