"""Softmax attention of a whole sequence to few keys, which every query sees.

Linformer's projected keys and Nyström's landmarks are few enough for one tile,
so a tile is as many rows as the platform's budget allows.
"""

import dataclasses
from typing import NamedTuple

from jaxtyping import Array, Float

from attention.core import loop, platform
from attention.core.relative import Relative
from attention.core.tile import Keys, Product


class Arrays(NamedTuple):
  """What has a derivative beside the queries."""

  key: Float[Array, "B K R H"]
  value: Float[Array, "B K R V"]


@dataclasses.dataclass(frozen=True)
class _FewKeys:
  """The `loop.Source` of keys that are the same for every tile."""

  rows: int
  kv_heads: int
  score: Product
  by_data: bool = False
  at_once: int = 1

  def visits(self, start: Array) -> None:
    """One."""
    del start

  def gather(
    self, arrays: Arrays, fixed: Array | None, place: loop.Place
  ) -> Keys:
    """All keys."""
    del fixed, place
    return Keys(*arrays)

  def limit(
    self, keys: Keys, fixed: Array | None, place: loop.Place, *, is_whole: bool
  ) -> Keys:
    """Adds what hides a key.

    Adding keeps the softmax one operation in XLA, where selecting would not.
    """
    del place, is_whole
    if fixed is None:
      return keys
    return keys._replace(bias=fixed[:, None, None, None, :])

  def add(
    self,
    totals: Arrays,
    gradient: Keys,
    fixed: Array | None,
    place: loop.Place,
  ) -> Arrays:
    """Sums the gradients of all tiles."""
    del fixed, place
    return Arrays(totals.key + gradient.key, totals.value + gradient.value)


def attend(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B K R H"],
  value: Float[Array, "B K R V"],
  hidden: Float[Array, "B R"] | None = None,
  *,
  scale: float = 1.0,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """softmax(scale · q kᵀ + hidden) v for every query.

  Args:
    query: `[B, T, N, H]`, N a multiple of K.
    key: `[B, K, R, H]`.
    value: `[B, K, R, V]`.
    hidden: 0, or a very low number that hides a key; None hides nothing.
    scale: factor of the logits.
    block_size: rows of a tile; None is the platform's choice.

  Returns:
    In the dtype of `query`. Cost: time T·R·N·(H+V), memory B·N·C·R for tiles of
    C rows.
  """
  batch, length, num_heads, _ = query.shape
  rows = platform.rows_at_once(4 * batch * num_heads * key.shape[2], length)
  if block_size is not None:
    rows = min(block_size, length)
  source = _FewKeys(rows=rows, kv_heads=key.shape[1], score=Product(scale))
  return loop.attend(source, query, Arrays(key, value), Relative(), hidden)
