"""Attention in windows of a grid (Swin; Liu et al., 2021).

This module checks arguments and brings positions into the order of windows and
back, by `grid`. What a window sees is in `windows`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.core import loop, platform, visibility
from attention.core.relative import Relative
from attention.core.tile import Product
from attention.window_2d import grid as grids
from attention.window_2d.windows import Arrays, Limits, Windows

_DEVIATION = 0.02
"""Standard deviation of the table before training, as in the paper's code."""


@arguments.attention_function(
  relative="give the table, relative_bias=[(2·window − 1)², N], or make the "
  "mechanism, window_2d(relative=…)",
)
def window_2d_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  grid: tuple[int, int] | None,
  window: int,
  shift: int = 0,
  relative_bias: Float[Array, "D N"] | None = None,
  hidden_logit: float | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Every query attends to the keys of its own window of a grid.

  The T positions are a grid, row after row. It is padded at the bottom and
  right to whole windows of w × w, rolled by (−s, −s) and cut into windows:

    (y, x) = ((row − s) mod R, (column − s) mod C)      R, C the padded sides
    A(t) = {s : ⌊y_s/w⌋ = ⌊y_t/w⌋, ⌊x_s/w⌋ = ⌊x_t/w⌋, not joined by the roll}
    out[t] = softmax over s in A(t) of (scale · q_t · k_s + b[i]), times v_s
    i = (y_t − y_s + w − 1) · (2w − 1) + (x_t − x_s + w − 1)

  Two positions of a window are joined by the roll where one row, or column, is
  less than s and the other is not. Padding is never seen. Every pair is further
  limited by `mask` and the segments. The content of a masked key changes
  nothing.

  Where min(rows, columns) ≤ w, the window is as large as the smaller of the two
  and nothing is shifted. The table remains that of `window`, and the smaller
  window reads the middle of it.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, S = T; N is a multiple of K, query head n reads key
      head n // (N/K).
    value: `[B, S, K, V]`.
    grid: (rows, columns), rows · columns = T. None is the grid nearest to a
      square, with ⌈√T⌉ columns, whose last row may be incomplete; it follows
      from the length, so that padding of a sequence changes who sees whom.
    window: w, the side of a window in positions.
    shift: s, 0 ≤ s < w. The paper shifts every second layer by ⌊w/2⌋.
    relative_bias: b `[(2w − 1)², N]`, added by (dy, dx) of query from key; None
      adds nothing.
    hidden_logit: added to pairs that only the roll joins, in place of hiding
      them. The published weights are trained with -100.0. None hides them.
    mask: key mask, broadcastable to `[B, 1, 1, S]`, True = attend.
    is_causal: must be False, because a window has keys on all sides.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    dropout_rate: share of attention weights set to zero; the others are
      divided by 1 - rate.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.
    block_size: queries that are computed at the same time, in whole windows and
      at least one. It changes only the rounding of the result. None is the
      platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. A query that sees no key gets zeros.

  Raises:
    ValueError: arguments do not fit together, the grid does not have T
      positions, the mask varies along queries, or `is_causal`.

  Cost, for P ≥ T positions with padding: time P·w²·N·(H+V); memory in addition
  to the arguments: a copy of query, key, value and result, N·w⁴ float32 of
  bias, and B·N·C·w² for C queries that are computed at the same time. Nothing
  is T×S, forward or backward.

  Departs from its paper's code in padding, which there is zeros before the
  projections, and seen; at the paper's sizes there is none. For a grid smaller
  than a window, that code makes the table of the smaller window, which is this
  function with that `window`; transformers keeps the table, and fails.

  Paper: Swin transformer: hierarchical vision transformer using shifted
  windows, section 3.2, arXiv:2103.14030.
  """
  arguments.check_qkv(query, key, value)
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True, but a window has keys on all sides "
      "of the query; sliding_window attention has a causal form, and so have "
      "flash and dense"
    )
  batch, length, num_heads, _ = query.shape
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the length of query, {length}, for both lie on one grid, "
      f"got {key.shape[1]}; use dense attention across"
    )
  places = grids.of_call(length, grid, window, shift)
  _check_table(relative_bias, window, num_heads)
  _check_hidden_logit(hidden_logit)
  if block_size is not None:
    arguments.check_at_least("block_size", block_size, 1)
  key_mask = arguments.key_mask(
    mask, query, key, "dense attention takes masks that vary"
  )
  arguments.check_segment_ids(query_segment_ids, key_segment_ids, query, key)
  arguments.check_dropout(dropout_rate, dropout_rng)
  query, scale = arguments.scaled_query(query, scale)

  to_windows, of_mask = places.to_windows, visibility.keys(key_mask)
  key, value = (to_windows(of_mask.readable(x, 0)) for x in (key, value))
  if key_mask is None and places.is_padded:
    key_mask = jnp.ones((1, length), bool)
  sees = visibility.keys(None if key_mask is None else to_windows(key_mask))
  if query_segment_ids is not None and key_segment_ids is not None:
    sees &= visibility.segments(
      to_windows(query_segment_ids), to_windows(key_segment_ids)
    )
  regions = places.regions() if places.shift else None
  area = places.window**2
  bias = _by_pair(relative_bias, places.window, window)
  if hidden_logit is None:
    sees &= visibility.segments(regions, regions)
    regions = None
  elif bias is None:
    # The hidden logit is added to a bias, so there has to be one.
    bias = jnp.zeros((num_heads, area, area))

  size = block_size or platform.rows_at_once(
    4 * batch * num_heads * area, key.shape[1]
  )
  source = Windows(
    rows=area,
    at_once=min(max(size // area, 1), key.shape[1] // area),
    kv_heads=key.shape[2],
    num_heads=num_heads,
    score=Product(scale),
    by_data=sees.by_data,
    hidden_logit=hidden_logit or 0.0,
    dropout_rate=dropout_rate,
  )
  out = loop.attend(
    source,
    to_windows(query),
    Arrays(key, value, bias),
    Relative(),
    Limits(sees, regions, dropout_rng),
  )
  return places.from_windows(out)


def _by_pair(
  table: Float[Array, "D N"] | None, side: int, window: int
) -> Float[Array, "N C C"] | None:
  """The bias of every pair of places in a window."""
  if table is None:
    return None
  bias = table.astype(jnp.float32)[grids.table_index(side, window)]
  return jnp.moveaxis(bias, 2, 0)


def _check_table(
  table: Float[Array, "D N"] | None, window: int, num_heads: int
) -> None:
  """Checks the shape of `relative_bias`."""
  expected = ((2 * window - 1) ** 2, num_heads)
  if table is not None and table.shape != expected:
    raise ValueError(
      f"relative_bias: expected [(2·window − 1)², N] = {list(expected)}, got "
      f"shape {table.shape}"
    )


def _check_hidden_logit(value: float | None) -> None:
  """Checks that `hidden_logit` is None or a finite number."""
  if value is None:
    return
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not math.isfinite(value):
    raise ValueError(
      f"hidden_logit: expected a finite number or None, got {value!r}"
    )


def window_2d(
  grid: tuple[int, int] | None = None,
  window: int = 7,
  shift: int = 0,
  relative: bool = True,
  hidden_logit: float | None = None,
) -> plug.Attention:
  """The plug of `window_2d_attention`.

  Args:
    grid: (rows, columns), which fixes the length of a call; None is the grid
      nearest to a square of every length.
    window: w, the side of a window.
    shift: s, how far the grid is rolled.
    relative: whether a table by (dy, dx) is trained and added to the logits. It
      is drawn from N(0, 0.02²), cut off at two deviations, as in the paper's
      code.
    hidden_logit: added to pairs that only the roll joins; None hides them.

  Returns:
    An `Attention` with trained `relative_bias [(2w − 1)², N]` where `relative`,
    and without variables otherwise.

  Raises:
    ValueError: an argument is out of range; by `init`, a table that takes more
      than `arguments.MOST_BYTES`.
  """
  grids.check(grid, window, shift)
  arguments.check_flag("relative", relative)
  _check_hidden_logit(hidden_logit)
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
    arguments.check_memory("window", window, math.prod(shape))
    table = jax.random.truncated_normal(key, -2.0, 2.0, shape)
    return {"params": {"relative_bias": _DEVIATION * table}}

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "window_2d", window_2d_attention, call, own=("relative_bias", *own)
    )
    params = variables.get("params", {})
    return window_2d_attention(query, key, value, **own, **params, **call)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=None,
    decode=None,
    supports=frozenset({"mask", "segments", "dropout"}),
    approximates="dense",
    cost="linear",
    sizes=plug.Sizes(
      short={"window": 3},
      timed=lambda length: {"window": 16},
    ),
  )
