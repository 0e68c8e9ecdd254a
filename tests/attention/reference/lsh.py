"""LSH attention of the Reformer, from the definition of its visible sets."""

import numpy as np

from tests.attention.reference.common import repeat_heads, softmax_average


def lsh_visible_sets(
  vectors,
  rotations,
  chunk_size,
  *,
  unmasked=None,
  segments=None,
  is_causal=False,
):
  """P_i of one example and head: a list of T sets of positions.

  Args:
    vectors: `[T, H]`, query and key.
    rotations: `[rounds, H, buckets/2]`.
    chunk_size: C.
    unmasked: `[T]` booleans, or None.
    segments: `[T]` integers, or None; tokens of two never share a bucket.
    is_causal: count distance inside buckets, towards the past.
  """
  length = len(vectors)
  present = [i for i in range(length) if unmasked is None or unmasked[i]]
  sets = [set() for _ in range(length)]
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
  query,
  value,
  *,
  rotations,
  chunk_size,
  mask=None,
  is_causal=False,
  scale=None,
  query_segment_ids=None,
  key_segment_ids=None,
):
  """One softmax of scale · q_i·q_j/|q_j| over j in P_i; masked ones get 0.

  So do tokens whose two segment ids differ.
  """
  batch, length, num_heads, head_dim = query.shape
  scale = 1 / np.sqrt(head_dim) if scale is None else scale
  value = repeat_heads(value, num_heads)
  norms = np.linalg.norm(query, axis=-1, keepdims=True)
  key = query / np.where(norms == 0, 1, norms)
  out = np.zeros((batch, length, num_heads, value.shape[-1]))
  for b, n in np.ndindex(batch, num_heads):
    sets = lsh_visible_sets(
      query[b, :, n],
      rotations,
      chunk_size,
      unmasked=None if mask is None else np.asarray(mask)[b, 0, 0],
      segments=None if key_segment_ids is None else key_segment_ids[b],
      is_causal=is_causal,
    )
    for i, visible in enumerate(sets):
      sees = sorted(visible)
      if (
        query_segment_ids is not None
        and query_segment_ids[b, i] != key_segment_ids[b, i]
      ):
        sees = []
      logits = scale * key[b, sees, n] @ query[b, i, n]
      out[b, i, n] = softmax_average(logits, value[b, sees, n])
  return out
