"""Functions of a score and its indices, as FlexAttention has them.

    score_mod(score, b, n, t, s) -> score        mask_mod(b, n, t, s) -> bool

b, n, t, s are arrays of whole numbers that broadcast against `[B, N, C, D]`, the scores
of a tile; so do the results. A function is traced once for the shape of a tile, and
the arrays that it closes over become arguments, so that gradients reach them.

Paper: Flex attention, arXiv:2412.05496.
"""

from collections.abc import Callable, Sequence
import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.mods import (
  MaskMod,
  ScoreMod,
  as_bool,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
  """A function of the arrays of a tile, without what it closed over.

  Attributes:
    function: `(consts, *arrays) -> result`.
    shape: of a tile, (B, N, C, D).
  """

  function: Callable[..., Array]
  shape: tuple[int, int, int, int]

  def indices(
    self, start: Array | int, first: Array | int
  ) -> tuple[Int[Array, "..."], ...]:
    """b, n, t, s of a tile whose first query and key are at these positions."""
    return indices(self.shape, start, first)


def indices(
  shape: tuple[int, int, int, int], start: Array | int, first: Array | int
) -> tuple[Int[Array, "..."], ...]:
  """b, n, t, s of scores (B, N, C, D) from a query and a key on."""
  batch, heads, rows, width = shape
  return (
    jnp.arange(batch)[:, None, None, None],
    jnp.arange(heads)[None, :, None, None],
    (start + jnp.arange(rows))[None, None, :, None],
    (first + jnp.arange(width))[None, None, None, :],
  )


def trace_score(
  score_mod: ScoreMod, shape: tuple[int, int, int, int]
) -> tuple[Traced, tuple[Array, ...]]:
  """A score_mod for tiles of a shape, and the arrays that it closes over.

  Raises:
    ValueError: it does not return a score for each pair.
  """
  return _trace("score_mod", score_mod, shape, [jnp.float32])


def trace_mask(
  mask_mod: MaskMod, shape: tuple[int, int, int, int]
) -> tuple[Traced, tuple[Array, ...]]:
  """Likewise a mask_mod."""
  return _trace("mask_mod", mask_mod, shape, [])


def _trace(name, function, shape, scores):
  if not callable(function):
    raise ValueError(
      f"{name}: expected a function, got {type(function).__name__}"
    )
  blank = Traced(lambda *_: jnp.zeros(()), shape)
  examples = jax.eval_shape(lambda: blank.indices(0, 0))
  given = [jax.ShapeDtypeStruct(shape, dtype) for dtype in scores]

  def whole(*arrays):
    found = function(*arrays)
    found = jnp.asarray(found, jnp.float32) if scores else as_bool(found)
    return jnp.broadcast_to(found, shape)

  closed = jax.make_jaxpr(whole)(*given, *examples)

  def call(consts, *arrays):
    return jax.core.eval_jaxpr(closed.jaxpr, consts, *arrays)[0]

  return Traced(call, shape), tuple(map(jnp.asarray, closed.consts))


def modified(
  mod: Traced,
  consts: Sequence[Array],
  scores: Float[Array, "B N C D"],
  start: Array | int,
  first: Array | int,
) -> Float[Array, "B N C D"]:
  """What a score_mod makes of the scores of a tile."""
  return mod.function(tuple(consts), scores, *mod.indices(start, first))


def shown(
  mod: Traced, consts: Sequence[Array], start: Array | int, first: Array | int
) -> Bool[Array, "B N C D"]:
  """Which pairs of a tile a mask_mod shows."""
  return mod.function(tuple(consts), *mod.indices(start, first))
