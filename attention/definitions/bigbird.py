"""BigBird (Zaheer et al., 2020), as the paper defines it."""

from jaxtyping import Bool, Float64
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions.dense import dense_attention


def attended_blocks(
  length: int, block_size: int, random_blocks: ArrayLike
) -> Bool[np.ndarray, "N T S"]:
  """The pairs of A(t): is the block of s one that the block of t attends to.

    A(t) = {s : b(s) ∈ {0, L, b(t)−1, b(t), b(t)+1} ∪ random_blocks[b(t)−1]}
    A(t) = all s                                        where b(t) ∈ {0, L}

  with b(t) = t // block_size and L = b(T−1).
  """
  random_blocks = np.asarray(random_blocks)
  num_heads = len(random_blocks)
  block = np.arange(length) // block_size
  last = block[-1]
  attended = np.zeros((num_heads, length, length), bool)
  for n, t in np.ndindex(num_heads, length):
    if block[t] in (0, last):
      attended[n, t] = True
    else:
      near = [0, last, block[t] - 1, block[t], block[t] + 1]
      blocks = [*near, *random_blocks[n, block[t] - 1]]
      attended[n, t] = np.isin(block, blocks)
  return attended


def bigbird_attention(
  query: ArrayLike,
  key: ArrayLike,
  value: ArrayLike,
  *,
  block_size: int,
  random_blocks: ArrayLike,
  mask: ArrayLike | None = None,
  is_causal: bool = False,
  scale: float | ArrayLike | None = None,
  query_segment_ids: ArrayLike | None = None,
  key_segment_ids: ArrayLike | None = None,
) -> Float64[np.ndarray, "B T N V"]:
  """Every query attends to the near, global and random blocks of its block.

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s) v_s

  with the A(t) of `attended_blocks`. It is one softmax over the union: a block
  that is listed twice, near or global as well counts once.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, S = T; query head n reads key head n // (N/K).
    value: `[B, S, K, V]`.
    block_size: C; the last block holds the positions that are left.
    random_blocks: `[N, max(L−1, 0), R]`, the random blocks of every block
      between the first and the last; a number outside [0, L], such as −1, names
      no block.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: must be False: every query sees the last block.
    scale: factor of the logits; None is 1/√H.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.

  Returns:
    `[B, T, N, V]` float64; zeros for a query that sees no key.

  Raises:
    ValueError: `is_causal`, or query and key of different lengths.

  Paper: Big Bird: transformers for longer sequences, section 2 and appendix D
  (internal transformer construction), arXiv:2007.14062.
  """
  length, source_length = np.shape(query)[1], np.shape(key)[1]
  if is_causal:
    raise ValueError("is_causal: expected False, got True")
  if source_length != length:
    raise ValueError(f"key: expected length {length}, got {source_length}")
  blocks = attended_blocks(length, block_size, random_blocks)
  return dense_attention(
    query,
    key,
    value,
    mask=blocks & np.asarray(True if mask is None else mask),
    scale=scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
  )
