"""Baselines for a model of a text: unigram and bigram losses."""

from typing import NamedTuple

import numpy as np

NONE = -1
"""The left neighbour of a token that has none."""


class Pairs(NamedTuple):
  """Tokens and their left neighbours.

  Attributes:
    left: [n] ids, `NONE` where there is none.
    token: [n] ids.
  """

  left: np.ndarray
  token: np.ndarray

  @classmethod
  def of(cls, text: np.ndarray) -> "Pairs":
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

  Of n counted tokens, c(t) are t; with V ids, one is added to each count:
  `p(t) = (c(t) + 1) / (n + V)`. Pairs are interpolated with it (Witten and Bell
  1991): where k(s) different tokens follow s, `p(t|s) = (c(s, t) + k(s) p(t)) /
  (c(s) + k(s))`, and p(t) where nothing follows s.

  Args:
    training: what is counted.
    held_out: what is predicted.
    size: V.

  Returns:
    'unigram_loss' and 'bigram_loss', means over the held-out tokens.

  Cost: time O(n log n) and memory O(n) of both sets together.
  """
  total = len(training.token)
  counts = np.bincount(training.token, minlength=size)
  unigram = ((counts + 1) / (total + size))[held_out.token]
  pairs, occurrences = np.unique(_codes(training, size), return_counts=True)
  # `NONE` counts as a neighbour too, hence one more.
  followers = np.bincount(pairs // size, minlength=size + 1)
  totals = np.bincount(training.left + 1, minlength=size + 1)
  codes = _codes(held_out, size)
  place = np.minimum(np.searchsorted(pairs, codes), len(pairs) - 1)
  hits = np.where(pairs[place] == codes, occurrences[place], 0)
  kinds, seen = followers[held_out.left + 1], totals[held_out.left + 1]
  bigram = np.where(
    seen > 0,
    (hits + kinds * unigram) / np.maximum(seen + kinds, 1),
    unigram,
  )
  return {
    "unigram_loss": float(-np.log(unigram).mean()),
    "bigram_loss": float(-np.log(bigram).mean()),
  }


def _codes(pairs: Pairs, size: int) -> np.ndarray:
  """One number per pair, ordered by the left token first."""
  return (pairs.left.astype(np.int64) + 1) * size + pairs.token
