"""Baselines for a model of a text: unigram and bigram losses."""

from typing import NamedTuple

import numpy as np

NONE = -1
"""Represents a missing left neighbour."""


class Pairs(NamedTuple):
  """Tokens and their left neighbours.

  Attributes:
    left: [n] ids, `NONE` if there is no left neighbour.
    token: [n] ids.
  """

  left: np.ndarray
  token: np.ndarray

  @classmethod
  def from_text(cls, text: np.ndarray) -> "Pairs":
    """Every token of a text except the first."""
    return cls(text[:-1], text[1:])

  @classmethod
  def join(cls, parts: list["Pairs"]) -> "Pairs":
    """Concatenates pairs."""
    lefts, tokens = zip(*parts, strict=True)
    return cls(np.concatenate(lefts), np.concatenate(tokens))


def ngram_losses(
  training: Pairs, held_out: Pairs, size: int
) -> dict[str, float]:
  """Cross-entropy of unigram and bigram counts, in nats per token.

  The unigram model adds one to each count: with n counted tokens, of which c(t) are
  t, and V ids, `p(t) = (c(t) + 1) / (n + V)`. The bigram model interpolates with it
  (Witten and Bell 1991): if k(s) different tokens follow s, `p(t|s) = (c(s, t) +
  k(s) p(t)) / (c(s) + k(s))`, and p(t) if no token follows s.

  Args:
    training: pairs for the counts.
    held_out: pairs that are predicted.
    size: V.

  Returns:
    'unigram_loss' and 'bigram_loss', as means over the held-out tokens.

  Cost: O(n log n) time and O(n) memory, for n tokens in both sets together.
  """
  total = len(training.token)
  counts = np.bincount(training.token, minlength=size)
  unigram = ((counts + 1) / (total + size))[held_out.token]
  pairs, occurrences = np.unique(_codes(training, size), return_counts=True)
  # One more id, because `NONE` is a neighbour as well.
  followers = np.bincount(pairs // size, minlength=size + 1)
  totals = np.bincount(training.left + 1, minlength=size + 1)
  codes = _codes(held_out, size)
  index = np.minimum(np.searchsorted(pairs, codes), len(pairs) - 1)
  hits = np.where(pairs[index] == codes, occurrences[index], 0)
  distinct, count = followers[held_out.left + 1], totals[held_out.left + 1]
  bigram = np.where(
    count > 0,
    (hits + distinct * unigram) / np.maximum(count + distinct, 1),
    unigram,
  )
  return {
    "unigram_loss": float(-np.log(unigram).mean()),
    "bigram_loss": float(-np.log(bigram).mean()),
  }


def _codes(pairs: Pairs, size: int) -> np.ndarray:
  """One number per pair, ordered by the left token first."""
  return (pairs.left.astype(np.int64) + 1) * size + pairs.token
