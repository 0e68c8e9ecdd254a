"""Compressed attention: a window, and one key and value for each closed window of keys.

DeepSeek-V4's heavily compressed attention (HCA) sees all of these entries, and its
compressed sparse attention (CSA) those that an indexer selects.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import attention_function
from attention.flash import flash_attention
from attention.platform import backend
from attention.platform.blocks import chunk_map
from attention.sliding_window import sliding_window_attention
from attention.softmax import indexer
from attention.softmax.block_selection import kept_first, positions_seen
from attention.softmax.tiles import Output, merge, with_sinks

_INSTEAD = (
  "compressed attention selects entries for each query; give a key mask"
)


@attention_function
def compressed_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  window: int,
  entries: Float[Array, "B M K H"],
  entry_values: Float[Array, "B M K V"] | None = None,
  stride: int,
  index_query: Float[Array, "B T I D"] | None = None,
  index_key: Float[Array, "B M D"] | None = None,
  index_weight: Float[Array, "B T I"] | None = None,
  top_k: int | None = None,
  sinks: Float[Array, "... N"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  return_lse: bool = False,
) -> Output:
  """Each query attends to a window of keys and to the entries of closed windows.

    out = compressed_attention(q, k, v, window=128, entries=c, stride=128)

    out[t] = softmax over both of (scale · q_t · k_s, scale · q_t · c_i), times (v_s, u_i)
    t − window < s ≤ t        i ∈ A(t) ⊂ {i : (i + 1)·m ≤ t + 1}

  with m = `stride`: an entry i counts from the last position of its window on. A(t) is
  all of these entries (HCA), or, with the index arrays, the `top_k` of largest

    I[t, i] = Σ_j index_weight[t, j] · relu(index_query[t, j] · index_key[i])     (CSA)

  Of entries with equal scores, the earlier is selected.

  Args:
    window: the number of plain keys of a query, its own among them.
    entries: c, the keys of the entries, made by `compressed_entries`; M is at most
      T // m.
    entry_values: u; None is `entries`, as in DeepSeek-V4, where H = V.
    stride: m.
    index_query: of I index heads.
    index_key: of entries, pooled as they are.
    index_weight: of each index head.
    top_k: the largest number of entries of a query, with an indexer.
    sinks: a logit of each head that takes weight and has no value, `[N]` or, for each
      query, `[B, T, N]`.
    mask: key mask, `[B, 1, 1, T]`; entries are those of the unmasked positions.
    is_causal: must be True, because an entry depends on its whole window.

  Other options: as `flash_attention`.

  Returns:
    As `flash_attention`. The index arrays have no gradient.

  Raises:
    ValueError: the mask varies along queries, `is_causal` is False, there are more
      entries than closed windows, or an index array is missing.

  Cost: time T·N·(H+V)·(window + M), and T·M·(I·D + 70) for a selection; memory as
  `flash_attention`, and B·C·M·(I+1) for C queries at a time.

  A model rotates queries and keys before, and entry i as position i·m. DeepSeek-V4 also
  rotates the last features of `out` back, as those of its values are rotated.

  Papers: DeepSeek-V4, sections 2.3.1 and 2.3.2, as in transformers 5.24.0.
  """
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; entries are of past windows"
    )
  length, count = query.shape[1], entries.shape[1]
  if count > length // stride:
    raise ValueError(
      f"entries: expected at most the {length // stride} closed windows of "
      f"{length} positions, got {count}"
    )
  index = index_query, index_key, index_weight, top_k
  if any(x is None for x in index) != all(x is None for x in index):
    raise ValueError(
      "index_query: expected it with index_key, index_weight and top_k, and only "
      "then"
    )
  keep = checks.key_mask(mask, query, key, _INSTEAD)
  near: Any = sliding_window_attention(
    query,
    key,
    value,
    window=(window - 1, 0),
    mask=mask,
    scale=scale,
    return_lse=True,
  )
  closed = positions_seen(keep, query.shape[:2]) // stride
  out, lse = near
  if count:
    values = entries if entry_values is None else entry_values
    far = _far(query, (entries, values), closed, index, scale)
    out, lse = merge(near, far)
  if sinks is not None:
    out, lse = with_sinks(out, lse, sinks)
  return (out, lse) if return_lse else out


def _far(query, entries, closed, index, scale):
  """(out, lse) over entries; `closed [B, T]` of them count for a query."""
  index_query, index_key, index_weight, top_k = index
  count, heads = entries[0].shape[1], 0
  rows = indexer.Rows(None, None, None, query, closed)
  if top_k is not None:
    heads = index_query.shape[2]
    index_query, index_key, index_weight = jax.lax.stop_gradient(index[:3])
    rows = rows._replace(index=index_query, weight=index_weight)

  def attend(rows):
    seen = jnp.arange(count)[None, None] < rows.place[..., None]
    if top_k is not None:
      keys = indexer.Keys(index_key, None, None)
      scores = indexer.index_scores(rows, keys, is_causal=False)
      seen = indexer.chosen(jnp.where(seen, scores, -jnp.inf), top_k)
    return flash_attention(
      rows.query, *entries, mask=seen[:, None], scale=scale, return_lse=True
    )

  batch, length = query.shape[:2]
  row_bytes = 4 * batch * count * (heads + 1)
  return chunk_map(attend, backend.rows_at_once(row_bytes, length), rows)


@attention_function
def compressed_entries(
  rows: Float[Array, "B T A *F"],
  gates: Float[Array, "B T A *G"],
  position_bias: Float[Array, "C A *G"],
  *,
  keep: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B M *F"]:
  """Pools each closed window of positions by a softmax of gates, for each feature.

    c_i = Σ_{a, j} softmax_{a, j}(gates[t, a] + b[j, a]) ∘ rows[t, a]
    t = (i + a + 1 − A)·m + j,  j < m

  with b = `position_bias`. The softmax is over all A·m terms of a feature. With A = 1,
  entry i pools window i (HCA). With A = 2, it pools the first series of window i − 1 and
  the second of window i (CSA); before the first window there is nothing.

  Args:
    rows: A series of features for each position.
    gates: of each feature of `rows`, or of several with axes of 1.
    position_bias: of each of the m positions of a window.
    keep: `[B, T]`, the positions that are not masked; windows are of these, in order.

  Returns:
    `[B, M, *F]` with M = T // m, in the dtype of `rows`. An entry whose window has fewer
    than m positions that are kept is for no query.

  Raises:
    ValueError: shapes do not fit.

  Cost: time and memory T·A·F.

  Papers: DeepSeek-V4, equations 9 to 12 and 20 to 23, as in transformers 5.24.0.
  """
  size, series = position_bias.shape[:2]
  if keep is not None:
    rows, gates = kept_first(keep, rows, gates)
  count = rows.shape[1] // size

  def windows(x):
    x = x[:, : count * size].astype(jnp.float32)
    return x.reshape(x.shape[0], count, size, *x.shape[2:])

  values, logits = windows(rows), windows(gates) + position_bias[None, None]

  def shifted(x, a, fill):
    """Series a of window i + a + 1 − A."""
    late = min(series - 1 - a, count)
    before = ((0, 0), (late, 0), *[(0, 0)] * (x.ndim - 3))
    x = jnp.take(x, a, axis=3)[:, : count - late]
    return jnp.pad(x, before[: x.ndim], constant_values=fill)

  parts = [
    (shifted(values, a, 0), shifted(logits, a, -jnp.inf)) for a in range(series)
  ]
  values, logits = (
    jnp.concatenate(x, axis=2) for x in zip(*parts, strict=True)
  )
  weights = jax.nn.softmax(logits, axis=2)
  return jnp.sum(weights * values, axis=2).astype(rows.dtype)
