"""What a tile of `window_2d_attention` sees: its own window.

Positions are in the order of windows (`grid`), so the C = w² queries of a tile
and their keys are the same slice.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention.core import dropout, layout, loop
from attention.core.tile import Keys, Product
from attention.core.visibility import Visibility


class Arrays(NamedTuple):
  """Arrays with a derivative, except the queries.

  Attributes:
    key: in the order of windows, zero where nobody may see it.
    value: of the same positions.
    bias: by pair of places in a window; None adds nothing.
  """

  key: Float[Array, "B P K H"]
  value: Float[Array, "B P K V"]
  bias: Float[Array, "N C C"] | None


class Limits(NamedTuple):
  """Which pairs count, and the key of dropout.

  Attributes:
    sees: the visibility of pairs of one window.
    regions: pairs of different regions get the hidden logit; None if they are
      hidden by `sees`, or if there are none.
    rng: a key; not read where the rate is 0.
  """

  sees: Visibility
  regions: Int[Array, "1 P"] | None
  rng: Array | None


@dataclasses.dataclass(frozen=True)
class Windows:
  """The `loop.Source` of windows.

  Attributes:
    rows: C.
    num_heads: N.
    hidden_logit: added to pairs of different regions.
    dropout_rate: share of weights set to zero.
  """

  rows: int
  at_once: int
  kv_heads: int
  num_heads: int
  score: Product
  by_data: bool
  hidden_logit: float
  dropout_rate: float

  def visits(self, start: Array | int) -> None:
    """One visit."""
    del start

  def _by_pair(self, batch: int) -> tuple[int, ...]:
    groups = self.num_heads // self.kv_heads
    return batch, self.kv_heads, groups, self.rows, self.rows

  def gather(self, arrays: Arrays, fixed: Limits, place: loop.Place) -> Keys:
    """The keys of the window, and the bias, which is that of every window."""
    del fixed
    key, value = (
      layout.heads_first(layout.cut(x, place.start, self.rows), self.kv_heads)
      for x in (arrays.key, arrays.value)
    )
    bias = arrays.bias
    if bias is not None:
      shape = self._by_pair(key.shape[0])
      bias = jnp.broadcast_to(bias.reshape(1, *shape[1:]), shape)
    return Keys(key, value, bias)

  def limit(
    self, keys: Keys, fixed: Limits, place: loop.Place, *, is_whole: bool
  ) -> Keys:
    """Which pairs count, and which of them dropout keeps."""
    del is_whole
    start, rows = place.start, self.rows
    bias, kept = keys.bias, None
    if bias is not None and fixed.regions is not None:
      region = layout.cut(fixed.regions, start, rows)[0]
      same = region[:, None] == region[None, :]
      bias += jnp.where(same, 0.0, self.hidden_logit)[None, None, None]
    if self.dropout_rate:
      shape = self._by_pair(keys.key.shape[0])
      kept = dropout.kept(fixed.rng, self.dropout_rate, shape, start // rows)
    visible = fixed.sees.block(start, rows, start, rows)
    visible = layout.by_kv_head(visible, self.kv_heads)
    return keys._replace(bias=bias, visible=visible, kept=kept)

  def add(
    self, totals: Arrays, gradient: Keys, fixed: Limits, place: loop.Place
  ) -> Arrays:
    """Adds the gradients of one window; those of the bias meet in one place."""
    del fixed
    key, value = (
      layout.add(total, layout.heads_last(x, self.rows), place.start)
      for total, x in zip(totals[:2], gradient[:2], strict=True)
    )
    bias = totals.bias
    if bias is not None and gradient.bias is not None:
      bias += jnp.sum(gradient.bias, 0).reshape(bias.shape)
    return Arrays(key, value, bias)
