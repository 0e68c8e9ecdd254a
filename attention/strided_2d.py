"""Attention to every s-th row and column of a grid (CvT; Wu et al., 2021).

This file selects the keys; the rest is `flash_attention`.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.flash import flash_attention
from attention.mechanism import Attention, Hyperparameters
from attention.softmax.rows import Output
from attention.window_2d import check_grid, nearest_square


@attention_function
def strided_2d_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  grid: tuple[int, int] | None,
  stride: int,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B T"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to the keys in every s-th row and column of a grid.

    out = strided_2d_attention(q, k, v, grid=(16, 16), stride=2)

  The last rows · columns of the T positions form a grid in row-major order. Tokens
  before it, such as [CLS], are not on the grid and are always visible.

    A = {tokens before the grid} ∪ {(y, x) : y mod s = 0, x mod s = 0}
    out[t] = softmax over s in A of (scale · q_t · k_s), times v_s

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    grid: (rows, columns), rows · columns ≤ T. None means the grid nearest to a
      square, with ⌈√T⌉ columns, whose last row may be incomplete.
    stride: s, at least 1; with 1 it is dense attention. The paper's is 2.
    is_causal: must be False: positions on a grid have no order.
    scale: factor of the logits; None means 1/√H. The paper's code uses 1/√F, where F is
      the number of features of all heads.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, T]`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    block_size: C, the number of rows computed at the same time.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Results: as in `flash_attention`, with S = T.

  Raises:
    ValueError: the grid has more than T positions, or the call is causal.

  Cost: that of `flash_attention` with T/s² keys: time T²/s²·N·(H+V). No array is T×S.

  The paper has a strided convolution before the projections of key and value. The
  model can apply it at every position, because this function selects every s-th result.

  Paper: CvT: introducing convolutions to vision transformers, section 3.2,
  arXiv:2103.15808.
  """
  if is_causal:
    raise ValueError(
      "is_causal: expected False, got True; positions on a grid have no order; "
      "flash and dense attention have causal forms"
    )
  length = query.shape[1]
  check_grid(grid)
  selected = _selected_positions(length, grid, stride)
  if mask is not None and mask.shape[-1] > 1:
    mask = mask[..., selected]
  if key_segment_ids is not None:
    key_segment_ids = key_segment_ids[:, selected]
  key, value = (
    # With unique indices, gradients need no sums, which half precision would round.
    jnp.asarray(x)
    .at[:, selected]
    .get(unique_indices=True, indices_are_sorted=True)
    for x in (key, value)
  )
  return flash_attention(
    query,
    key,
    value,
    mask=mask,
    scale=scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    block_size=block_size,
    return_lse=return_lse,
  )


def _selected_positions(
  length: int, grid: tuple[int, int] | None, stride: int
) -> Int[np.ndarray, "C"]:
  """The positions of the selected keys."""
  rows, columns = grid or nearest_square(length)
  # The default grid may have an incomplete last row.
  prefix = 0 if grid is None else length - rows * columns
  if prefix < 0:
    raise ValueError(
      f"grid: expected rows · columns of at most {length}, the length of query, "
      f"got {rows} · {columns} = {rows * columns}"
    )
  positions = np.arange(rows * columns).reshape(rows, columns)
  positions = prefix + positions[::stride, ::stride].ravel()
  return np.concatenate([np.arange(prefix), positions[positions < length]])


@attention_factory
def strided_2d(
  grid: tuple[int, int] | None = None, stride: int = 2
) -> Attention:
  """The mechanism of `strided_2d_attention`.

  Args:
    grid: (rows, columns); None means the grid nearest to a square of every length.
    stride: s.

  Returns:
    An `Attention` without variables.
  """
  check_grid(grid)
  own = {"grid": None if grid is None else tuple(grid), "stride": stride}

  return Attention(
    init=lambda key, dims: {},
    apply=make_apply("strided_2d", strided_2d_attention, lambda variables: own),
    init_cache=None,
    decode=None,
    supports=frozenset({"mask", "full_mask", "segments", "dropout"}),
    approximates="dense",
    cost="quadratic",
    sizes=Hyperparameters(short={"stride": 2}),
  )
