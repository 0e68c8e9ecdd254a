"""Intervals and tests of what seeds and sentences show, by SciPy."""

from collections.abc import Mapping, Sequence
import math
from typing import NamedTuple
import warnings

import numpy as np
from scipy import special, stats

LEVEL = 0.95
RESAMPLES = 1000


def mean_interval(
  values: Sequence[float], upper: float = math.inf, cases: int | None = None
) -> tuple[float, float]:
  """The 95 % interval of a mean over seeds, within 0 and `upper`.

  Student's t. Of a share p = mean / upper it is taken on the logit scale, where
  the standard error s / √n is divided by the slope p (1 − p):

    logit(p) ± t · s / (√n · upper · p · (1 − p))

  It never leaves the range, and far from both ends it is the common interval. Of
  three shares from Beta(9, 1) it holds the true mean in 95 % of cases; the common
  one, cut at 1, in 90 %.

  Args:
    values: one a seed, not below 0 and not above `upper`.
    upper: bound of the metric; an accuracy has 1.
    cases: rows of the test set, all of them the same for all seeds. The interval
      is then no narrower than Wilson's for a share of so many rows.

  Returns:
    Its ends; NaN for less than two values.
  """
  if (count := len(values)) < 2:
    return math.nan, math.nan
  mean = float(np.mean(values))
  half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * stats.sem(values))
  if math.isinf(upper):
    return max(mean - half, 0.0), mean + half
  share, low, high = mean / upper, mean, mean
  if half and 0 < share < 1:
    slope = upper * share * (1 - share)
    ends = special.logit(share) + np.array([-half, half]) / slope
    low, high = (float(x) * upper for x in special.expit(ends))
  if cases:
    least, most = wilson(share * cases, cases)
    low, high = min(low, least * upper), max(high, most * upper)
  return low, high


def wilson(successes: float, trials: int) -> tuple[float, float]:
  """Wilson's 95 % interval of a share.

  Args:
    successes: rounded to a whole number.
    trials: at least 1.
  """
  test = stats.binomtest(round(successes), trials)
  low, high = test.proportion_ci(LEVEL, "wilson")
  return float(low), float(high)


def p_of_means(
  values: Mapping[int, float], others: Mapping[int, float]
) -> float:
  """The p of two means being equal, two-sided.

  Student's t paired by seed, since runs of one seed see the same data in the same
  order; Welch's t where fewer than two seeds are common.

  Args:
    values: seed -> value.
    others: of another mechanism.

  Returns:
    p; NaN where either has fewer than two values.
  """
  seeds = sorted(values.keys() & others.keys())
  with warnings.catch_warnings():  # Of values that are all alike.
    warnings.simplefilter("ignore", RuntimeWarning)
    if len(seeds) > 1:
      pair = [[sample[seed] for seed in seeds] for sample in (values, others)]
      p = 1.0 if pair[0] == pair[1] else stats.ttest_rel(*pair).pvalue
      return float(p)
    if min(len(values), len(others)) < 2:
      return math.nan
    pair = [list(values.values()), list(others.values())]
    p = float(stats.ttest_ind(*pair, equal_var=False).pvalue)
  return 1.0 if math.isnan(p) else p


class RowModel(NamedTuple):
  """All rows of a table against the first, by one pooled variance.

  Attributes:
    p_values: of the other rows, with Holm's correction.
    degrees: of freedom of the residuals.
    p_variances: of the rows' residuals having one variance; where it is small, the
      pooled one is too large for some rows and too small for others.
  """

  p_values: list[float]
  degrees: int
  p_variances: float


def row_model(values: np.ndarray) -> RowModel:
  """The model y_rs = row_r + seed_s + error, with one variance of the errors.

  Two-way analysis of variance without interaction. A row has a share in the
  variance of all, so that few seeds of many rows tell more apart than by pairs:

    t = (mean_r − mean_1) / √(2 σ² / S),  σ² = Σ residuals² / ((R − 1)(S − 1))

  The variances are compared by Bartlett's test of the residuals: Levene's of three
  seeds a row finds nothing, as one of three deviations from a median is 0.

  Args:
    values: [R, S], the first row first; two rows and two seeds at least.
  """
  rows, seeds = values.shape
  means = values.mean(axis=1)
  residuals = values - means[:, None] - values.mean(axis=0) + means.mean()
  degrees = (rows - 1) * (seeds - 1)
  variance = (residuals**2).sum() / degrees
  differences = means[1:] - means[0]
  with np.errstate(divide="ignore", invalid="ignore"):  # Of rows all alike.
    t = np.nan_to_num(np.abs(differences) / math.sqrt(2 * variance / seeds))
    p_variances = float(stats.bartlett(*residuals).pvalue)
  p_values = holm((2 * stats.t.sf(t, degrees)).tolist())
  return RowModel(p_values, degrees, p_variances)


def p_of_counts(
  solved: int, seeds: int, others: int, other_seeds: int
) -> float:
  """The p of two mechanisms solving a task equally often: Fisher's exact test."""
  table = [[solved, seeds - solved], [others, other_seeds - others]]
  return float(stats.fisher_exact(table).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
  """p-values for all of a family of tests at once (Holm 1979); NaN stays.

  The k-th smallest of m is multiplied with m − k + 1, and none is below one that
  was smaller.
  """
  p = np.asarray(p_values, float)
  tested = np.flatnonzero(~np.isnan(p))
  order = tested[np.argsort(p[tested], kind="stable")]
  factors = np.arange(len(order), 0, -1)
  adjusted = p.copy()
  adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
  return adjusted.tolist()


class Difference(NamedTuple):
  """BLEU of one system less that of another: its 95 % interval, p of none."""

  mean: float
  low: float
  high: float
  p_value: float


def bleu(counts: np.ndarray, effective_order: bool = False) -> np.ndarray:
  """Corpus BLEU of sums of sentence statistics [..., 10], smoothed as 'exp'.

  SacreBLEU's own function takes one corpus at a time; a bootstrap has thousands.
  They agree to the last digits.

  Args:
    counts: n-grams of order 1 to 4 that are right, all of order 1 to 4, the length
      of the output and of the reference, as SacreBLEU has them.
    effective_order: take the mean over the orders that the output has n-grams of.

  Returns:
    0 to 100 [...].
  """
  right, total = counts[..., :4], counts[..., 4:8]
  length, reference = counts[..., 8], counts[..., 9]
  halved = 0.5 ** np.cumsum(right == 0, axis=-1, dtype=float)
  precision = np.where(right > 0, right, halved) / np.maximum(total, 1)
  mask = total > 0
  logs = np.where(mask, np.log(precision), 0.0).sum(axis=-1)
  orders = np.maximum(mask.sum(axis=-1), 1) if effective_order else 4
  brevity = np.minimum(1 - reference / np.maximum(length, 1), 0)
  nonzero = right.any(axis=-1) & (effective_order | mask.all(axis=-1))
  return np.where(nonzero, 100 * np.exp(logs / orders + brevity), 0.0)


def bleu_difference(
  statistics: np.ndarray, others: np.ndarray, effective_order: bool = False
) -> Difference:
  """BLEU of one system less that of another, each a mean over K seeds.

  The paired bootstrap (Koehn 2004): sentences are drawn with replacement, the same
  ones for both systems and for all seeds, which SacreBLEU's own test does not
  know; for one seed its numbers are these but for the draws. With δ of all
  sentences and δ_r of draw r,

    p = (1 + #{r: |δ_r| − mean_r |δ_r| > |δ|}) / (R + 1)

  as SacreBLEU defines it; of systems that are equal in every draw p is 1.

  Args:
    statistics: of N sentences [K, N, 10], as in `bleu`.
    others: of the same sentences by the other system [K, N, 10].
    effective_order: as in `bleu`.
  """

  def difference(sentences, axis=-1):
    del axis  # Of `sentences`, the last.
    ours, theirs = (
      bleu(counts[:, sentences].sum(axis=-2), effective_order).mean(axis=0)
      for counts in (statistics, others)
    )
    return ours - theirs

  sentences = np.arange(statistics.shape[1])
  bootstrap = stats.bootstrap(
    (sentences,),
    difference,
    n_resamples=RESAMPLES,
    batch=50,
    vectorized=True,
    method="percentile",
    rng=np.random.default_rng(12345),
  )
  mean = float(difference(sentences))
  spread = np.abs(bootstrap.bootstrap_distribution)
  exceedances = int(np.sum(spread - spread.mean() > abs(mean)))
  p_value = (1 + exceedances) / (1 + RESAMPLES) if spread.any() else 1.0
  interval = bootstrap.confidence_interval
  return Difference(mean, float(interval.low), float(interval.high), p_value)


def are_paired(systems: Sequence[np.ndarray]) -> bool:
  """Whether statistics [N, 10] of several runs are of the same sentences.

  They are taken to be where the references have the same lengths in order.
  """
  first = systems[0][:, -1]
  return all(np.array_equal(first, system[:, -1]) for system in systems[1:])
