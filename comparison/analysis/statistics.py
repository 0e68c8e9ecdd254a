"""Confidence intervals and tests over seeds and sentences, with SciPy."""

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

  The interval is Student's t. For a share p = mean / upper it is computed on the
  logit scale, with the standard error s / √n divided by the slope p (1 − p):

    logit(p) ± t · s / (√n · upper · p · (1 − p))

  This interval never leaves the range, and far from both ends it equals the usual
  one. For three shares from Beta(9, 1) it covers the true mean in 95 % of cases; the
  usual one, clipped at 1, in 90 %.

  Args:
    values: one value per seed, from 0 to `upper`.
    upper: upper bound of the metric; 1 for an accuracy.
    cases: number of rows of the test set, which all seeds share. The interval is
      then at least as wide as Wilson's for a share of this many rows.

  Returns:
    Its ends; NaN for fewer than two values.
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
    successes: number of successes, which is rounded.
    trials: number of trials, at least 1.
  """
  test = stats.binomtest(round(successes), trials)
  low, high = test.proportion_ci(LEVEL, "wilson")
  return float(low), float(high)


def p_of_means(
  values: Mapping[int, float], others: Mapping[int, float]
) -> float:
  """The two-sided p-value of a test that two means are equal.

  Student's t-test paired by seed, since runs of one seed see the same data in the
  same order; Welch's t-test if there are fewer than two common seeds.

  Args:
    values: maps seeds to values.
    others: values of another mechanism.

  Returns:
    p; NaN if either has fewer than two values.
  """
  seeds = sorted(values.keys() & others.keys())
  with warnings.catch_warnings():  # SciPy warns about equal values.
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
  """Tests of all rows of a table against the first, with one pooled variance.

  Attributes:
    p_values: p-values of the other rows, with Holm's correction.
    degrees: degrees of freedom of the residuals.
    p_variances: p-value of equal residual variances of the rows; if it is small, the
      pooled variance is too large for some rows and too small for others.
  """

  p_values: list[float]
  degrees: int
  p_variances: float


def row_model(values: np.ndarray) -> RowModel:
  """The model y_rs = row_r + seed_s + error, with one variance of the errors.

  This is a two-way analysis of variance without interaction. The variance is pooled
  over all rows, so few seeds of many rows give more power than paired tests:

    t = (mean_r − mean_1) / √(2 σ² / S),  σ² = Σ residuals² / ((R − 1)(S − 1))

  Bartlett's test compares the variances of the residuals. Levene's test has no power
  with three seeds per row, because one of three deviations from a median is 0.

  Args:
    values: [R, S], starting with the first row; at least two rows and two seeds.
  """
  rows, seeds = values.shape
  means = values.mean(axis=1)
  residuals = values - means[:, None] - values.mean(axis=0) + means.mean()
  degrees = (rows - 1) * (seeds - 1)
  variance = (residuals**2).sum() / degrees
  differences = means[1:] - means[0]
  with np.errstate(divide="ignore", invalid="ignore"):  # For equal rows.
    t = np.nan_to_num(np.abs(differences) / math.sqrt(2 * variance / seeds))
    p_variances = float(stats.bartlett(*residuals).pvalue)
  p_values = holm((2 * stats.t.sf(t, degrees)).tolist())
  return RowModel(p_values, degrees, p_variances)


def p_of_counts(
  solved: int, seeds: int, others: int, other_seeds: int
) -> float:
  """p-value of Fisher's exact test that two mechanisms solve a task equally often."""
  table = [[solved, seeds - solved], [others, other_seeds - others]]
  return float(stats.fisher_exact(table).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
  """Holm's correction of the p-values of a family of tests (Holm 1979); NaN stays.

  The k-th smallest of m is multiplied by m − k + 1, and the results are made
  non-decreasing.
  """
  p = np.asarray(p_values, float)
  tested = np.flatnonzero(~np.isnan(p))
  order = tested[np.argsort(p[tested], kind="stable")]
  factors = np.arange(len(order), 0, -1)
  adjusted = p.copy()
  adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
  return adjusted.tolist()


class Difference(NamedTuple):
  """A difference of BLEU between systems: its 95 % interval, and p of no difference."""

  mean: float
  low: float
  high: float
  p_value: float


def bleu(counts: np.ndarray, effective_order: bool = False) -> np.ndarray:
  """Corpus BLEU of summed sentence statistics [..., 10], with smoothing 'exp'.

  SacreBLEU's function takes one corpus at a time, and a bootstrap has thousands. The
  results agree up to rounding.

  Args:
    counts: matching n-grams of order 1 to 4, all n-grams of order 1 to 4, the length
      of the output, and the length of the reference, as in SacreBLEU.
    effective_order: takes the mean only over orders of which the output has n-grams.

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
  """BLEU of one system minus that of another, each as a mean over K seeds.

  Paired bootstrap (Koehn 2004): sentences are drawn with replacement, the same ones
  for both systems and for all seeds. SacreBLEU's test does not support seeds; for one
  seed it differs only in the draws. With the difference δ over all sentences and δ_r
  in draw r,

    p = (1 + #{r: |δ_r| − mean_r |δ_r| > |δ|}) / (R + 1)

  as in SacreBLEU; if the systems are equal in every draw, p is 1.

  Args:
    statistics: statistics of N sentences [K, N, 10], as in `bleu`.
    others: statistics of the same sentences by the other system [K, N, 10].
    effective_order: as in `bleu`.
  """

  def difference(sentences, axis=-1):
    del axis  # Always the last axis of `sentences`.
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
  """Whether statistics [N, 10] of several runs belong to the same sentences.

  They count as the same if the lengths of the references agree.
  """
  first = systems[0][:, -1]
  return all(np.array_equal(first, system[:, -1]) for system in systems[1:])
