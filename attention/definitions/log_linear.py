"""Log-linear attention by definition, with a state and a scale for each level."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import gated_linear, recurrent, shared
from attention.definitions.shared import Result


def log_linear_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  log_decay: ArrayLike,
  level_scales: ArrayLike,
  scale: float | ArrayLike | None = None,
  initial_state: tuple[ArrayLike, ArrayLike] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
  **options: Any,
) -> Any:
  """Gated linear attention in which each level of a tree has a state.

    out_t = scale · Σ_l scales_tl (S_t^l)ᵀ q_t

  S^0 has only position t. After each position, the states of all levels below the first
  empty level are merged into that level, as in a binary counter. Masked positions are
  skipped and give zeros. The state is S of levels 1, 2, … `[B, N, L-1, H, V]` and the
  number of their positions, `[B]`. Other arguments are those of `delta_rule_attention`.

  Paper: arXiv:2506.04761, section 3.
  """
  arrays = query, key, value, log_decay, level_scales
  query, key, value, g, scales = shared.as_float64(*arrays)
  options["num_segments"] = num_segments
  is_start, visible, segment = recurrent.segment_starts(
    *query.shape[:2], **options
  )
  batch, length, num_heads, head_dim = query.shape
  key = shared.repeat_heads(key, num_heads)
  value = shared.repeat_heads(value, num_heads)
  scale = shared.logit_scale(scale, head_dim)
  shape = batch, num_heads, scales.shape[3] - 1, head_dim, value.shape[3]
  first, count = (None, None) if initial_state is None else initial_state
  older = recurrent.first_state(first, shape, num_segments)
  sums = np.concatenate([np.zeros_like(older[:, :, :, :1]), older], axis=3)
  count = recurrent.first_state(count, (batch,), num_segments).astype(int)
  counts = np.repeat(count[:, :, None], num_heads, axis=2)
  out = np.zeros((batch, length, num_heads, value.shape[3]))
  for b, n, t in np.ndindex(batch, num_heads, length):
    at = b, segment[b, t], n
    if is_start[b, t]:
      sums[at], counts[at] = 0.0, 0
    if visible[b, t]:
      own = sums[at]
      own *= np.exp(g[b, t, n])
      own[0] = np.outer(key[b, t, n], value[b, t, n])
      read = np.einsum("lhv,h->lv", own, query[b, t, n])
      out[b, t, n] = scale * scales[b, t, n] @ read
      counts[at] += 1
      # The lowest set bit of the count; the last level has all older positions.
      level = int(counts[at] & -counts[at]).bit_length()
      level = min(level, scales.shape[3] - 1)
      own[level] += own[:level].sum(axis=0)
      own[:level] = 0.0
  state = sums[:, :, :, 1:], counts[:, :, 0]
  if num_segments is None:
    state = state[0][:, 0], state[1][:, 0]
  return (out, state) if return_state else out


def log_linear(
  query: ArrayLike, key: ArrayLike, value: ArrayLike, **rest: Any
) -> Result:
  """Log-linear Mamba-2, with the scales softplus(a ∘ (inputs · W)).

  W is `level_kernel` `[F, N, L]` and a is `level_gain` `[N, L]`. Other arguments are
  those of `mamba2`.
  """
  weights = rest.pop("level_kernel"), np.zeros(1)
  logits = recurrent.linear(rest["inputs"], *weights, call=rest)
  scales = np.logaddexp(0.0, np.asarray(rest.pop("level_gain")) * logits)

  def rule(*qkv, **call):
    return log_linear_attention(*qkv, level_scales=scales, **call)

  return gated_linear.mamba2(query, key, value, rule=rule, **rest)
