"""LSH attention (Reformer, Kitaev 2020), from its visible sets."""

from jaxtyping import Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared


def lsh_visible_sets(
  vectors: np.ndarray,
  rotations: np.ndarray,
  chunk_size: int,
  *,
  unmasked: np.ndarray | None = None,
  segments: np.ndarray | None = None,
  is_causal: bool = False,
) -> list[set[int]]:
  r"""P_i of one example and head, for each of its T positions i.

    h_r(j) = argmax [q_j R_r; −q_j R_r],        P_i = ∪_r P_i^(r) \ {i}

  Round r sorts the tokens by (bucket, position) and cuts them into chunks of
  C. P_i^(r) are the tokens of i's bucket in i's chunk or in the one before it.
  Causal, they are the last C tokens of i's bucket up to i, i included. A token
  that sees no other sees itself, and a masked one sees nothing.

  Args:
    vectors: `[T, H]`, query and key.
    rotations: R, `[rounds, H, buckets/2]`.
    chunk_size: C.
    unmasked: `[T]` booleans, or None.
    segments: `[T]` integers, or None; tokens of different segments never share
      a bucket.
    is_causal: count distance inside buckets, towards the past.
  """
  length = len(vectors)
  present = [i for i in range(length) if unmasked is None or unmasked[i]]
  sets: list[set[int]] = [set() for _ in range(length)]
  for rotation in rotations:
    bucket = {}
    for i in present:
      products = vectors[i] @ rotation
      both = np.concatenate([products, -products])
      number = int(np.argmax(both)) if len(both) else 0
      bucket[i] = (0 if segments is None else segments[i], number)
    in_order = sorted(present, key=lambda i: (bucket[i], i))
    chunk = {i: place // chunk_size for place, i in enumerate(in_order)}
    rank = {
      i: sum(bucket[j] == bucket[i] for j in present if j < i) for i in present
    }
    for i in present:
      for j in present:
        if bucket[i] != bucket[j]:
          continue
        if is_causal:
          near = j <= i and rank[i] - rank[j] < chunk_size
        else:
          near = chunk[i] - chunk[j] in (0, 1)
        if near:
          sets[i].add(j)
  for i in present:
    if sets[i] != {i}:
      sets[i].discard(i)
  return sets


def lsh_attention(
  query: ArrayLike,
  value: ArrayLike,
  *,
  rotations: ArrayLike,
  chunk_size: int,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Every token attends to near ones of its own bucket, over several hashes.

    out_i = Σ_{j∈P_i} softmax_{j∈P_i}(scale · q_i·k_j) v_j
    k_j = q_j / |q_j|,  0 for q_j = 0

  with the P_i of `lsh_visible_sets`.

  Args:
    query: `[B, T, N, H]`, queries and, normalised, keys.
    value: `[B, S, K, V]`, S = T; query head n reads head n // (N/K).
    rotations: `[rounds, H, buckets/2]`; a last axis of 0 is one bucket.
    chunk_size: C.
    mask: token mask, True = attend, broadcastable to `[B, 1, 1, T]`.
    is_causal: token i sees j ≤ i only.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a token sees those of its own segment only.
    key_segment_ids: `[B, T]`, the same once more. A token whose two ids differ
      sees nothing.

  Returns:
    `[B, T, N, V]` float64; zeros for a masked token.

  Raises:
    ValueError: only one of the two segment ids is given, or a mask that is not
      a token mask.

  Departs from the paper in the causal form, whose distance is counted inside
  the bucket, and in that the first chunk does not look back on the last.

  Paper: Reformer, the efficient transformer, section 2, arXiv:2001.04451.
  """
  query, value, rotations = shared.as_float64(query, value, rotations)
  batch, length, num_heads, head_dim = query.shape
  scale = shared.logit_scale(scale, head_dim)
  visible = shared.visible_tokens(mask, batch, length)
  # Segments, of pair (i, i): do the two ids of token i agree.
  agrees = shared.visible_pairs(
    (batch, 1, length, length),
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  ).diagonal(axis1=2, axis2=3)[:, 0]
  query = np.where(visible[:, :, None, None], query, 0.0)
  value = shared.repeat_heads(value, num_heads)
  norms = np.linalg.norm(query, axis=-1, keepdims=True)
  key = query / np.where(norms == 0, 1, norms)

  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n in np.ndindex(batch, num_heads):
    sets = lsh_visible_sets(
      query[b, :, n],
      rotations,
      chunk_size,
      unmasked=visible[b],
      segments=None
      if key_segment_ids is None
      else np.asarray(key_segment_ids)[b],
      is_causal=is_causal,
    )
    for i, visible_set in enumerate(sets):
      if agrees[b, i]:
        j = sorted(visible_set)
        logits = scale * key[b, j, n] @ query[b, i, n]
        out[b, i, n] = shared.softmax(logits) @ value[b, j, n]
  return out
