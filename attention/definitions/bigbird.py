"""BigBird (Zaheer et al., 2020), as the paper defines it."""

from typing import Any

from jaxtyping import Bool
import numpy as np
from numpy.typing import ArrayLike

from attention.definitions import shared
from attention.definitions.dense import dense_attention


def attended_blocks(
  length: int, block_size: int, random_blocks: ArrayLike
) -> Bool[np.ndarray, "N T S"]:
  """The pairs (t, s) with s in A(t): the block of t attends to the block of s.

    A(t) = {s : b(s) ∈ {0, L, b(t)−1, b(t), b(t)+1} ∪ random_blocks[b(t)−1]}
    A(t) = all s                                        if b(t) ∈ {0, L}

  with b(t) = t // block_size and L = b(T−1).
  """
  random_blocks = np.asarray(random_blocks)
  block = np.arange(length) // block_size
  last = block[-1]
  attended = np.ones((len(random_blocks), length, length), bool)
  for n, t in np.ndindex(attended.shape[:2]):
    if block[t] not in (0, last):
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
  **options: Any,
) -> shared.Result:
  """Every query attends to the neighbouring, global and random blocks of its block.

    out[t] = Σ_{s∈A(t)} softmax_{s∈A(t)}(scale · q_t · k_s) v_s

  with the A(t) of `attended_blocks`. It is one softmax over the union: a block that is
  listed twice, or is also a neighbour or global, counts once.

  Args:
    block_size: C; the last block has the remaining positions.
    random_blocks: `[N, max(L−1, 0), R]`, the random blocks of every block between the
      first and the last; a number outside [0, L], such as −1, is ignored.
    **options: as `dense_attention`; is_causal must be False.

  Paper: Big Bird, section 2 and appendix D, arXiv:2007.14062.
  """
  shared.check_both_directions(query, key, **options)
  blocks = attended_blocks(np.shape(query)[1], block_size, random_blocks)
  options["mask_mod"] = lambda b, n, t, s: blocks[n, t, s]
  return dense_attention(query, key, value, **options)
