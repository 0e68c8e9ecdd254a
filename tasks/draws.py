"""Random numbers that depend only on (seed, split, index).

Philox is a counter-based generator (Salmon et al. 2011): it can start at any count.
Each example starts at its own count, so it depends on neither batch size nor order.
The code uses raw words, which are equal in all versions of NumPy.
"""

from collections.abc import Iterator

import numpy as np


def split_key(seed: int, split: str) -> np.ndarray:
  """The generator's key [2] of a split; no two splits share a number."""
  sequence = np.random.SeedSequence([seed, *split.encode()])
  return sequence.generate_state(2, np.uint64)


def words(key: np.ndarray, indices: np.ndarray, count: int) -> np.ndarray:
  """The first `count` random words of each example, [B, count] of 64 bits."""
  philox = np.random.Philox(key=key)
  state = philox.state
  rows = np.empty((len(indices), count), np.uint64)
  for row, index in zip(rows, indices, strict=True):
    # Five times as fast as a new generator for each example.
    state["state"]["counter"][:] = _counter(index)
    philox.state = state
    row[:] = philox.random_raw(count)
  return rows


def stream(key: np.ndarray, index: int) -> Iterator[int]:
  """An infinite stream of random words of one example."""
  philox = np.random.Philox(key=key, counter=_counter(index))
  while True:
    yield from philox.random_raw(1024).tolist()


def below(raw: np.ndarray, size: int) -> np.ndarray:
  """Integers 0 … size − 1, uniform up to size / 2^64."""
  return (raw % np.uint64(size)).astype(np.int64)


def distinct(raw: np.ndarray, size: int) -> np.ndarray:
  """Integers 0 … size − 1, distinct within each row.

  Each is drawn from the remaining integers: the i-th draw is below size − i, and is
  then incremented once for each smaller integer that was drawn before. So the cost does
  not grow with `size`.

  Args:
    raw: [B, K] words, K at most `size`.
    size: the number of integers to draw from.

  Returns:
    [B, K], in the order of the draws.
  """
  drawn = np.empty(raw.shape, np.int64)
  for i in range(raw.shape[1]):
    drawn[:, i] = below(raw[:, i], size - i)
    for previous in np.sort(drawn[:, :i], axis=1).T:
      drawn[:, i] += drawn[:, i] >= previous
  return drawn


def distinct_weighted(
  raw: np.ndarray, weights: np.ndarray, count: int
) -> np.ndarray:
  """Draws columns without replacement, in proportion to their weights.

  Sorting exponential waiting times with rates `weights` gives this distribution
  (Efraimidis and Spirakis 2006).

  Args:
    raw: [B, S] words.
    weights: [S], above 0.
    count: number of columns to draw, at most S.

  Returns:
    [B, count], in the order of the draws.
  """
  uniform = (raw >> np.uint64(11)) * 2.0**-53
  times = -np.log1p(-uniform) / weights
  return np.argsort(times, axis=1, kind="stable")[:, :count]


def _counter(index: int) -> tuple[int, int, int, int]:
  """The generator's counter of an example, with room for 2^64 words."""
  return 0, int(index), 0, 0
