"""The paired bootstrap of BLEU over sentences (Koehn 2004), in float64.

Sentences are drawn with replacement, and corpus BLEU is taken of each draw. The draws
are the same for both systems, so that what makes a sentence easy for both of them
cancels in their difference.

Koehn (2004), "Statistical significance tests for machine translation evaluation".
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 1000
_SEED = 12345  # Of SacreBLEU, whose resamples these are.
_ORDER = 4


class Difference(NamedTuple):
  """How much better one system is than another.

  Attributes:
    mean: difference of BLEU of all sentences.
    low: lower end of its 95 % interval.
    high: upper end.
    p_value: how often a difference so large would come about by chance.
  """

  mean: float
  low: float
  high: float
  p_value: float


def draws(num_sentences: int, resamples: int = RESAMPLES) -> np.ndarray:
  """How often each of N sentences is in each of R resamples [R, N], always alike."""
  generator = np.random.default_rng(_SEED)
  return np.stack(
    [
      np.bincount(
        generator.choice(num_sentences, num_sentences), minlength=num_sentences
      )
      for _ in range(resamples)
    ]
  ).astype(np.float64)


def bleu(sums: np.ndarray, effective_order: bool = False) -> np.ndarray:
  """Corpus BLEU of sums of statistics [..., 10], as SacreBLEU smooths it ('exp').

  Where no n-gram of an order is right, its precision is 1 / (2^k total) for the
  k-th order of that kind; BLEU is 0 where no word is right.

  Args:
    sums: n-grams of order 1 to 4 that are right, all of order 1 to 4, the length of
      the output and of the reference.
    effective_order: take the mean over the orders that the output has n-grams of;
      without, it is 0 where one of the four is missing.

  Returns:
    0 to 100 [...].
  """
  right, total = sums[..., :_ORDER], sums[..., _ORDER : 2 * _ORDER]
  length, reference = sums[..., -2], sums[..., -1]
  smoothed = np.where(
    right > 0, right, 0.5 ** np.cumsum(right == 0, axis=-1, dtype=float)
  )
  is_there = total > 0
  logs = np.log(
    np.where(is_there, smoothed, 1.0) / np.where(is_there, total, 1.0)
  )
  orders = is_there.sum(axis=-1)
  mean = logs.sum(axis=-1) / (
    np.maximum(orders, 1) if effective_order else _ORDER
  )
  brevity = np.minimum(1.0 - reference / np.maximum(length, 1.0), 0.0)
  counts = right.any(axis=-1) & (effective_order | (orders == _ORDER))
  return np.where(counts, 100.0 * np.exp(mean + brevity), 0.0)


def paired(
  statistics: np.ndarray,
  others: np.ndarray,
  drawn: np.ndarray,
  effective_order: bool = False,
) -> Difference:
  """BLEU of one system less that of another, each a mean over K runs.

  With δ of all sentences and δ_r of resample r,

    p = (1 + #{r: |δ_r| − mean_r |δ_r| > |δ|}) / (R + 1)

  which is the p-value of SacreBLEU's paired bootstrap for K = 1. Of systems that are
  equal in every resample p is 1, where SacreBLEU has 1 / (R + 1), as if they surely
  differed. The interval goes from the 2.5 % to the 97.5 % quantile of δ_r.

  Args:
    statistics: of N sentences [K, N, 10], as in `bleu`.
    others: of the same sentences by the other system [K, N, 10].
    drawn: of `draws` [R, N].
    effective_order: as in `bleu`.

  Returns:
    The difference, with its interval and p-value.
  """

  def mean_bleu(counts):
    of_both = [
      bleu(counts @ of_system, effective_order).mean(axis=0)
      for of_system in (statistics, others)
    ]
    return of_both[0] - of_both[1]

  mean = mean_bleu(np.ones((1, statistics.shape[1]))).item()
  found = np.sort(mean_bleu(drawn))
  cut = len(found) // 40
  spread = np.abs(found)
  beyond = np.sum(spread - spread.mean() > abs(mean)).item()
  p_value = (1 + beyond) / (1 + len(found)) if found.any() else 1.0
  return Difference(mean, found[cut].item(), found[-1 - cut].item(), p_value)


def are_paired(systems: Sequence[np.ndarray]) -> bool:
  """Whether the statistics [N, 10] of several runs are of the same sentences.

  They are taken to be where the references have the same lengths in order: another
  order or another split would not.
  """
  first = systems[0][:, -1]
  return all(np.array_equal(first, one[:, -1]) for one in systems[1:])
