"""Attention within the windows of a grid of positions (Swin; Liu et al., 2021)."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.mechanism import Attention, Hyperparameters
from attention.platform import backend, layout
from attention.platform.blocks import block_map, pad
from attention.softmax import dropout
from attention.softmax.rows import block_attention


@attention_function
def window_2d_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  grid: tuple[int, int] | None,
  window: int,
  shift: checks.FromZero = 0,
  relative_bias: Float[Array, "D N"] | None = None,
  hidden_logit: float | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | None = None,
  return_lse: bool = False,
) -> Float[Array, "B T N V"] | tuple[Array, Array]:
  """Each query attends to the keys in its own window of a grid.

    out = window_2d_attention(q, k, v, grid=(16, 16), window=4)

  The T positions form a grid in row-major order. The grid is padded at the bottom and
  right to whole windows of w × w, rolled by (−s, −s) and divided into windows:

    (y, x) = ((row − s) mod R, (column − s) mod C)      R, C the padded sides
    A(t) = {s : ⌊y_s/w⌋ = ⌊y_t/w⌋, ⌊x_s/w⌋ = ⌊x_t/w⌋, not joined by the roll}
    out[t] = softmax over s in A(t) of (scale · q_t · k_s + b[i]), times v_s
    i = (y_t − y_s + w − 1) · (2w − 1) + (x_t − x_s + w − 1)

  The roll joins two positions of a window if one row, or column, is less than s and the
  other is not. Padding is never visible. `mask` and the segments restrict the pairs
  further.

  If min(rows, columns) ≤ w, the window has this size and is not shifted. The bias table
  is still that of `window`, and the smaller window uses its middle.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    grid: (rows, columns), rows · columns = T. None means the grid nearest to a
      square, with ⌈√T⌉ columns, whose last row may be incomplete. It depends on the
      length, so padding a sequence changes which keys a query sees.
    window: w, the side of a window in positions.
    shift: s, 0 ≤ s < w. The paper shifts every second layer by ⌊w/2⌋.
    relative_bias: b `[(2w − 1)², N]`, added by the offset (dy, dx) of query from key;
      None means no bias.
    hidden_logit: added to the logits of pairs that only the roll joins, instead of
      masking them. The published weights were trained with -100.0. None masks them.
    mask: key mask, `[B, 1, 1, S]`.
    is_causal: must be False, because a window has keys on all sides.
    block_size: the number of queries computed at the same time, in whole windows, at
      least one; None means the platform's choice.
    scale: factor of the logits; None means 1/√H.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, T]`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Results: as in `flash_attention`, with S = T.

  Raises:
    ValueError: the grid does not have T positions, the mask varies along queries, or
      the call is causal.

  Cost, for P ≥ T positions with padding: time P·w²·N·(H+V); memory in addition
  to the arguments: a copy of query, key, value and result, N·w⁴ float32 of
  bias, and B·N·C·w² for C queries computed at the same time. No array is T×S.

  Differs from the paper's code in padding: that code pads with zeros before the
  projections, which queries see, although the paper's sizes need no padding. For a grid
  smaller than a window, that code creates the table of the smaller window, as this
  function does with that `window`; transformers keeps the larger table, and raises.

  Paper: Swin transformer: hierarchical vision transformer using shifted
  windows, section 3.2, arXiv:2103.14030.
  """
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True; a window has keys on all sides of "
      "the query; sliding_window, flash and dense attention have causal forms"
    )
  batch, length, num_heads, _ = query.shape
  kv_heads = key.shape[2]
  _check_options(grid, window, shift, hidden_logit)
  cells = make_grid(length, grid, window, shift)
  expected = [(2 * window - 1) ** 2, num_heads]
  if relative_bias is not None and list(relative_bias.shape) != expected:
    raise ValueError(
      f"relative_bias: expected [(2·window − 1)², N] = {expected}, got shape "
      f"{relative_bias.shape}"
    )
  keep = checks.key_mask(mask, query, key)
  scale = checks.softmax_scale(scale, query.shape[-1])

  area, count = cells.window**2, math.prod(cells.windows)
  head_shape = kv_heads, num_heads // kv_heads
  bias = None
  if relative_bias is not None:
    # A window smaller than that of the table uses the table's middle.
    y, x = jnp.divmod(jnp.arange(area), cells.window)
    dy, dx = (z[:, None] - z[None] + window - 1 for z in (y, x))
    bias = relative_bias.astype(jnp.float32)[dy * (2 * window - 1) + dx]
    bias = jnp.moveaxis(bias, 2, 0).reshape(1, *head_shape, area, area)
  keep = jnp.ones((1, length), bool) if keep is None else keep
  key, value = (layout.zero_masked(x, keep) for x in (key, value))

  def attend(query, key, value, keep, query_ids, key_ids, regions, number):
    """Attention in one window."""
    visible, window_bias, factors = keep[:, None, :], bias, None
    if query_ids is not None:
      visible &= query_ids[:, :, None] == key_ids[:, None, :]
    if regions is not None:
      same_region = regions[:, :, None] == regions[:, None, :]
      if hidden_logit is None:
        visible &= same_region
      else:
        window_bias = jnp.where(same_region, 0.0, hidden_logit)[:, None, None]
        window_bias += 0.0 if bias is None else bias
    if dropout_rate:
      is_shared = dropout.is_shared(dropout_rng)
      heads = (1, 1, 1) if is_shared else (batch, *head_shape)
      shape = (*heads, area, area)
      factors = dropout.factors(dropout_rng, dropout_rate, shape, number[0])
    return block_attention(
      query,
      jnp.swapaxes(key, 1, 2),
      jnp.swapaxes(value, 1, 2),
      scale=scale,
      bias=window_bias,
      visible=visible[:, None, None],
      dropout_factors=factors,
    )

  size = block_size or backend.rows_per_tile(
    4 * batch * num_heads * area, count * area
  )
  ids = query_segment_ids, key_segment_ids
  arrays = query, key, value, keep, *ids, cells.regions()
  arrays = jax.tree.map(cells.to_windows, arrays)
  number = jnp.arange(count)[None]
  results = block_map(attend, max(size // area, 1), *arrays, number)
  out, lse = jax.tree.map(cells.from_windows, results)
  return (out, lse) if return_lse else out


class Grid(NamedTuple):
  """The layout of T positions on a grid, in row-major order, and in its windows.

  Attributes:
    length: T, at most rows · columns; only the last row may be incomplete.
    rows: the number of rows.
    columns: the number of columns.
    window: w, at most as large as the smaller of the two.
    shift: s, less than w.
  """

  length: int
  rows: int
  columns: int
  window: int
  shift: int

  @property
  def windows(self) -> tuple[int, int]:
    """The number of windows in a column and in a row of the padded grid."""
    return -(-self.rows // self.window), -(-self.columns // self.window)

  def to_windows(self, x: Shaped[Array, "B T *F"]) -> Shaped[Array, "B G C *F"]:
    """Arranges `x` in G windows of C = w² cells; cells without a position are zeros."""
    w, (down, across) = self.window, self.windows
    x = pad(x, self.rows * self.columns - self.length)
    x = x.reshape(x.shape[0], self.rows, self.columns, *x.shape[2:])
    x = pad(x, down * w - self.rows, across * w - self.columns)
    x = jnp.roll(x, (-self.shift, -self.shift), (1, 2))
    x = x.reshape(x.shape[0], down, w, across, w, *x.shape[3:]).swapaxes(2, 3)
    return x.reshape(x.shape[0], down * across, w * w, *x.shape[5:])

  def from_windows(
    self, x: Shaped[Array, "B G C *F"]
  ) -> Shaped[Array, "B T *F"]:
    """Undoes `to_windows`."""
    w, (down, across) = self.window, self.windows
    x = x.reshape(x.shape[0], down, across, w, w, *x.shape[3:]).swapaxes(2, 3)
    x = x.reshape(x.shape[0], down * w, across * w, *x.shape[5:])
    x = jnp.roll(x, (self.shift, self.shift), (1, 2))
    x = x[:, : self.rows, : self.columns]
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.length]

  def regions(self) -> Int[Array, "1 T"] | None:
    """A number per position, which differs for positions that only the roll joins."""
    if not self.shift:
      return None
    rows, columns = jnp.divmod(jnp.arange(self.length), self.columns)
    return (2 * (rows < self.shift) + (columns < self.shift))[None]


def make_grid(
  length: int, grid: tuple[int, int] | None, window: int, shift: int
) -> Grid:
  """Creates the grid of a call; raises ValueError unless it has T positions."""
  rows, columns = grid or nearest_square(length)
  if grid is not None and rows * columns != length:
    raise ValueError(
      f"grid: expected rows · columns = {length}, the length of query, got "
      f"{rows} · {columns} = {rows * columns}"
    )
  smaller = min(rows, columns)
  if smaller <= window:
    window, shift = smaller, 0
  return Grid(length, rows, columns, window, shift)


def nearest_square(length: int) -> tuple[int, int]:
  """⌈√T⌉ columns and as many rows as needed; the last row may be incomplete."""
  columns = math.isqrt(length - 1) + 1
  return -(-length // columns), columns


def check_grid(grid: Any) -> None:
  """Raises ValueError unless `grid` is None or two numbers of at least 1."""
  if grid is None:
    return
  if not isinstance(grid, tuple | list) or len(grid) != 2:
    raise ValueError(f"grid: expected (rows, columns) or None, got {grid!r}")
  for side in grid:
    checks.check_at_least("grid", side, 1)


def _check_options(
  grid: Any, window: int, shift: int, hidden_logit: float | None
) -> None:
  """Checks the arguments that do not depend on the length."""
  check_grid(grid)
  if shift >= window:
    raise ValueError(
      f"shift: expected less than window, {window}, got {shift}; half of it is "
      "usual"
    )
  if hidden_logit is not None and (
    not isinstance(hidden_logit, int | float)
    or isinstance(hidden_logit, bool)
    or not math.isfinite(hidden_logit)
  ):
    raise ValueError(
      f"hidden_logit: expected a finite number or None, got {hidden_logit!r}"
    )


@attention_factory
def window_2d(
  grid: tuple[int, int] | None = None,
  window: int = 7,
  shift: checks.FromZero = 0,
  relative: bool = True,
  hidden_logit: float | None = None,
) -> Attention:
  """The mechanism of `window_2d_attention`.

  Args:
    grid: (rows, columns), which fixes the length of a call; None means the grid
      nearest to a square of every length.
    window: w.
    shift: s.
    relative: whether to train a bias table by (dy, dx). It is drawn from N(0, 0.02²),
      truncated at two standard deviations, as in the paper's code.
    hidden_logit: as in `window_2d_attention`.

  Returns:
    An `Attention`, whose parameter with `relative` is `relative_bias [(2w − 1)², N]`.
  """
  _check_options(grid, window, shift, hidden_logit)
  own = {
    "grid": None if grid is None else tuple(grid),
    "window": window,
    "shift": shift,
    "hidden_logit": hidden_logit,
  }

  def init(key, dims):
    if not relative:
      return {}
    shape = ((2 * window - 1) ** 2, dims.num_heads)
    table = jax.random.truncated_normal(key, -2.0, 2.0, shape)
    return {"params": {"relative_bias": 0.02 * table}}

  def options(variables):
    return {**own, "relative_bias": None, **variables.get("params", {})}

  return Attention(
    init=init,
    apply=make_apply("window_2d", window_2d_attention, options),
    init_cache=None,
    decode=None,
    supports=frozenset({"mask", "segments", "dropout"}),
    approximates="dense",
    cost="linear",
    sizes=Hyperparameters(
      short={"window": 3}, timed=lambda length: {"window": 16}
    ),
  )
