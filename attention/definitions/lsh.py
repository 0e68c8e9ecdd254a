"""LSH attention (Reformer, Kitaev et al., 2020), with explicit visible sets."""

from typing import Any

from jaxtyping import Bool, Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def lsh_visible_sets(
  vectors: Float64[np.ndarray, "T H"],
  unmasked: Bool[np.ndarray, "T"],
  segments: np.ndarray,
  rotations: Float64[np.ndarray, "rounds H D"],
  chunk_size: int,
  is_causal: bool,
) -> Bool[np.ndarray, "T S"]:
  r"""The visible sets P_i of one example and head, as rows of a matrix.

    h_r(j) = argmax [q_j R_r; −q_j R_r],        P_i = ∪_r P_i^(r) \ {i}

  Round r sorts the tokens by (bucket, position) and splits them into chunks of C.
  P_i^(r) has the tokens of i's bucket in i's chunk or the previous chunk. In causal
  calls, it has the last C tokens of i's bucket up to and including i. A token that sees
  no other token sees itself, and a masked token sees nothing. Tokens of different
  segments never share a bucket.
  """
  length = len(vectors)
  sets = np.zeros((length, length), bool)
  past = np.tri(length, dtype=bool)
  for rotation in rotations:
    products = vectors @ rotation
    products = np.concatenate([products, -products], axis=-1)
    bucket = np.zeros(length, int)
    if products.size:
      bucket = products.argmax(axis=-1)
    same_bucket = (bucket[:, None] == bucket) & (segments[:, None] == segments)
    same_bucket &= unmasked[:, None] & unmasked
    if is_causal:
      rank = (same_bucket & past).sum(axis=-1)
      is_near = past & (rank[:, None] - rank < chunk_size)
    else:
      # Masked tokens are sorted to the end.
      order = np.lexsort((bucket, segments, ~unmasked))
      chunk = np.argsort(order) // chunk_size
      is_near = np.isin(chunk[:, None] - chunk, (0, 1))
    sets |= same_bucket & is_near
  diagonal = np.eye(length, dtype=bool)
  sees_others = (sets & ~diagonal).any(axis=-1, keepdims=True)
  return sets & ~(diagonal & sees_others)


def lsh_attention(
  query: ArrayLike,
  value: ArrayLike,
  *,
  rotations: ArrayLike,
  chunk_size: int,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  key_segment_ids: ArrayLike | None = None,
  **options: Any,
) -> shared.Result:
  """Every token attends to near tokens of its own bucket, over several hash rounds.

    out_i = Σ_{j∈P_i} softmax_{j∈P_i}(scale · q_i·k_j) v_j
    k_j = q_j / |q_j|,  0 for q_j = 0

  with the P_i of `lsh_visible_sets`.

  Args:
    query: `[B, T, N, H]`, the queries and, after normalisation, the keys.
    value: `[B, T, K, V]`.
    rotations: `[rounds, H, buckets/2]`; a last axis of 0 means one bucket.
    chunk_size: C.
    mask: token mask, broadcastable to `[B, 1, 1, T]`.
    is_causal: token i sees only j ≤ i.
    key_segment_ids: `[B, T]`; a token sees only its own segment.
    **options: scale, and query_segment_ids, which equal key_segment_ids; a token whose
      two ids differ sees nothing.

  It departs from the paper: the causal form counts distances within the bucket, and the
  first chunk does not attend to the last one.

  Paper: Reformer, section 2, arXiv:2001.04451.
  """
  query, rotations = shared.as_float64(query, rotations)
  batch, length, num_heads, _ = query.shape
  unmasked = shared.visible_tokens(mask, batch, length)
  query = shared.zero_masked(query, unmasked)
  norms = np.linalg.norm(query, axis=-1, keepdims=True)
  key = query / np.where(norms == 0, 1, norms)
  ids = np.zeros(()) if key_segment_ids is None else key_segment_ids
  segments = np.broadcast_to(ids, (batch, length))
  visible = np.zeros((batch, num_heads, length, length), bool)
  for b, n in np.ndindex(batch, num_heads):
    example = query[b, :, n], unmasked[b], segments[b]
    visible[b, n] = lsh_visible_sets(*example, rotations, chunk_size, is_causal)
  options |= {"mask": visible, "key_segment_ids": key_segment_ids}
  return dense_attention(query, key, value, **options)
