"""Confidence intervals and tests over seeds and sentences, with SciPy."""

from collections.abc import Iterator, Sequence
import itertools
import math
from typing import NamedTuple

import numpy as np
from scipy import special, stats

LEVEL = 0.95
RESAMPLES = 1000

FEWEST = 3
"""Smallest number of common seeds of a test; two differences may agree by chance."""

SHUFFLES = 9999
_BATCH, _EPSILON = 1000, 1e-9


def mean_interval(
  values: Sequence[float], upper: float = math.inf, cases: int | None = None
) -> tuple[float, float]:
  """The 95 % interval of a mean over seeds, within 0 and `upper`.

  The interval is Student's t. It extends below 0 only if a value does, such as the
  log-likelihood of a density. For a share p = mean / upper it is computed on the
  logit scale, with the standard error s / √n divided by the slope p (1 − p):

    logit(p) ± t · s / (√n · upper · p · (1 − p))

  This interval never leaves the range, and far from both ends it equals Student's.
  For three shares from Beta(9, 1) it covers the true mean in 95 % of cases; Student's
  interval, clipped at 1, in 90 %.

  Args:
    values: one value per seed; from 0 to `upper` if that is finite.
    upper: upper bound of the metric; 1 for an accuracy.
    cases: number of rows of the test set, which all seeds share. The interval is
      then at least as wide as Wilson's for a share of this many rows.

  Returns:
    The ends of the interval; NaN for fewer than two values.
  """
  if (count := len(values)) < 2:
    return math.nan, math.nan
  mean = float(np.mean(values))
  half = float(stats.t.ppf((1 + LEVEL) / 2, count - 1) * stats.sem(values))
  if math.isinf(upper):
    low = mean - half
    return low if min(values) < 0 else max(low, 0.0), mean + half
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


class RowComparison(NamedTuple):
  """Comparison of every row of a table with one of them.

  Attributes:
    difference: mean of the row minus that of the other, over their common seeds [R].
    low: lower end of the 95 % interval of the difference [R].
    high: its upper end [R].
    p_values: adjusted p-values [R]; NaN if there are too few seeds, or if the
      differences do not vary.
    test: the name of the test, for a reader.
  """

  difference: np.ndarray
  low: np.ndarray
  high: np.ndarray
  p_values: np.ndarray
  test: str


def compare_with_first(values: np.ndarray) -> RowComparison:
  """Compares the mean of each row with that of the first, which is the best of them.

  In the model y_rs = row_r + seed_s + error, Tukey's test holds for all pairs of rows
  at once, and so for the best row with each of the others:

    q = |mean_r − mean_1| / √(σ² / S),  σ² = Σ residuals² / ((R − 1)(S − 1))

  where q has the distribution of the studentized range. It assumes equal variances. If
  Bartlett's test rejects them for the residuals at 5 %, or values are missing, the test
  is Student's t-test paired by seed, with Holm's correction over all pairs of rows.

  Args:
    values: [R, S] with the first row first, NaN where a row lacks a seed.
  """
  rows, seeds = values.shape
  residuals = values - values.mean(axis=1, keepdims=True)
  residuals += values.mean() - values.mean(axis=0)
  degrees = (rows - 1) * (seeds - 1)
  scale = math.sqrt((residuals**2).sum() / max(degrees, 1) / seeds)
  if math.isnan(scale):
    return _pairs(values, all_pairs=True, reason="rows have different seeds")
  if seeds < FEWEST or scale < _EPSILON * np.abs(values).max():
    return _pairs(values, all_pairs=True, reason="")
  with np.errstate(divide="ignore", invalid="ignore"):  # A row may not vary.
    p_variances = float(stats.bartlett(*residuals).pvalue) if rows > 2 else 1.0
  if not p_variances >= 1 - LEVEL:
    reason = f"variances differ, Bartlett p = {p_variances:.2g}"
    return _pairs(values, all_pairs=True, reason=reason)
  difference = values.mean(axis=1) - values[0].mean()
  p = stats.studentized_range.sf(np.abs(difference) / scale, rows, degrees)
  half = scale * stats.studentized_range.ppf(LEVEL, rows, degrees)
  p[0] = math.nan
  return RowComparison(
    difference, difference - half, difference + half, p,
    f"Tukey's test of all pairs of rows, paired by seed, {degrees} degrees of freedom",
  )  # fmt: skip


def compare_with_reference(values: np.ndarray) -> RowComparison:
  """Compares the mean of each row with that of the first, a declared reference.

  The test is Student's t-test paired by seed, with Holm's correction over the other
  rows.

  Args:
    values: as in `compare_with_first`.
  """
  return _pairs(values, all_pairs=False)


def _pairs(
  values: np.ndarray, all_pairs: bool, reason: str = ""
) -> RowComparison:
  """Paired t-tests against the first row, corrected for these or for all pairs."""
  rows = len(values)
  i, j = np.triu_indices(rows, 1)
  i, j = (i, j) if all_pairs else (i[i == 0], j[i == 0])
  *_, p = _paired_t_test(values[i], values[j])
  p_values = np.array([math.nan, *holm(p.tolist())[: rows - 1]])
  # Bonferroni's correction, because Holm's gives no intervals.
  level = 1 - (1 - LEVEL) / max(len(i), 1)
  first = np.broadcast_to(values[0], values.shape)
  difference, low, high, _ = _paired_t_test(first, values, level)
  family = "all pairs of rows" if all_pairs else "the other rows"
  test = f"Student's t-test paired by seed, Holm's correction over {family}"
  test += f" ({reason})" if reason else ""
  return RowComparison(difference, low, high, p_values, test)


def _paired_t_test(
  first: np.ndarray, second: np.ndarray, level: float = LEVEL
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Student's test that the means of P pairs of rows are equal, without missing seeds.

  A pair whose differences vary only by rounding has no p-value.

  Args:
    first: [P, S], NaN where a row lacks a seed.
    second: [P, S]; the differences are `second - first`.
    level: coverage of the intervals.

  Returns:
    Means, both ends of their intervals, and p-values, each [P].
  """
  differences = second - first
  present = ~np.isnan(differences)
  sizes = np.where(present, np.maximum(np.abs(first), np.abs(second)), 0.0)
  rounding = _EPSILON * sizes.max(axis=1)
  count = present.sum(axis=1)
  with np.errstate(invalid="ignore", divide="ignore"):
    mean = np.where(present, differences, 0.0).sum(axis=1) / count
    squares = np.where(present, (differences - mean[:, None]) ** 2, 0.0).sum(
      axis=1
    )
    error = np.sqrt(squares / (count - 1) / count)
    error[(count < FEWEST) | ~(error > rounding)] = math.nan
    half = error * stats.t.ppf((1 + level) / 2, count - 1)
    p_values = 2 * stats.t.sf(np.abs(mean) / error, count - 1)
  return mean, mean - half, mean + half, p_values


def p_by_shuffles(
  values: np.ndarray, threshold: float, all_pairs: bool = True
) -> np.ndarray:
  """p-values of all rows against the first, by permutation within seeds.

  A run has two scores: whether its value reaches the threshold, and the value clipped
  at the threshold. They are shuffled among the rows of a seed. With D_ij the sum over
  the n_ij common seeds of the differences of a score, in standard deviations of the
  score,

    T_ij = max over the two scores of |D_ij| / √n_ij
    p_j = share of the shuffles with max over pairs of T ≥ T_1j

  If all rows are equal, a table has a p-value below 5 % with a probability of at most
  5 %, whatever the distribution and however the first row was chosen.

  Args:
    values: [R, S] with the first row first; higher is better; NaN where a row lacks a
      seed.
    threshold: values of at least this solve the task; ∞ uses only the values.
    all_pairs: the maximum is over all pairs of rows; else over those with the first
      row, which must then be declared beforehand.

  Returns:
    [R], NaN for the first row and those with too few common seeds. All shuffles are
    enumerated if there are fewer than `SHUFFLES`; else `SHUFFLES` are drawn.
  """
  values = values[:, ~np.isnan(values).all(axis=0)]
  present = ~np.isnan(values)
  solved = np.where(present, values >= threshold, math.nan)
  scores = np.stack([np.minimum(values, threshold), solved])
  rounding = _EPSILON * np.nanmax(np.abs(scores), axis=(1, 2), keepdims=True)
  scores = scores - np.nanmean(scores, axis=1, keepdims=True)
  deviations = np.nanstd(scores, axis=(1, 2), keepdims=True)
  scores /= np.where(deviations > rounding, deviations, math.inf)
  indicators = present.T.astype(float)
  common = indicators.T @ indicators
  compared = slice(None) if all_pairs else slice(1)

  def statistic(batch):
    sums = batch @ indicators
    differences = np.abs(sums - np.swapaxes(sums, -1, -2)).max(axis=-3)
    return differences / np.sqrt(np.maximum(common, 1))

  scores = np.where(present, scores, 0.0)
  largest = np.concatenate([
    statistic(batch)[:, compared].max(axis=(1, 2))
    for batch in _shuffles(scores, present)
  ])  # fmt: skip
  count = (largest[:, None] >= statistic(scores)[0] - _EPSILON).sum(axis=0)
  is_drawn = len(largest) == SHUFFLES
  p = (count + is_drawn) / (len(largest) + is_drawn)
  p[(common[0] < FEWEST) | (np.arange(len(p)) == 0)] = math.nan
  return p


def _shuffles(scores: np.ndarray, present: np.ndarray) -> Iterator[np.ndarray]:
  """Scores [N, K, R, S] shuffled within seeds, all or `SHUFFLES`, in batches."""
  present_rows = [np.flatnonzero(rows) for rows in present.T]
  counts = [math.factorial(len(rows)) for rows in present_rows]
  is_small = math.prod(counts) < SHUFFLES
  total = math.prod(counts) if is_small else SHUFFLES
  generator = np.random.default_rng(12345)
  for start in range(0, total, _BATCH):
    numbers = np.arange(start, min(start + _BATCH, total))
    batch = np.zeros((len(numbers), *scores.shape))
    for seed, rows in enumerate(present_rows):
      if is_small:
        orders = np.array(list(itertools.permutations(range(len(rows)))))
        order = orders[numbers % counts[seed]]
        numbers = numbers // counts[seed]
      else:
        order = np.tile(np.arange(len(rows)), (len(numbers), 1))
        order = generator.permuted(order, axis=1)
      batch[..., rows, seed] = scores[:, rows, seed][:, order].swapaxes(0, 1)
    yield batch


def share_difference(
  successes: int, trials: int, other_successes: int, other_trials: int
) -> tuple[float, float, float]:
  """The first share minus the second, with Newcombe's interval.

  Method 10 of Newcombe (1998): with shares p, q and their intervals [l, u],

    p − q − √((p − l_p)² + (u_q − q)²)  to  p − q + √((u_p − p)² + (q − l_q)²)
  """
  p, q = successes / trials, other_successes / other_trials
  (low, high), (other_low, other_high) = (
    wilson(successes, trials), wilson(other_successes, other_trials)
  )  # fmt: skip
  below = math.hypot(p - low, other_high - q)
  above = math.hypot(high - p, q - other_low)
  return p - q, p - q - below, p - q + above


def survival_curve(
  steps: np.ndarray, solved: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """The share of seeds that have not solved a task, by step (Kaplan and Meier 1958).

  Args:
    steps: steps of each seed until it solves the task, or until its end.
    solved: whether each seed solves the task; the others are censored.

  Returns:
    The steps, and the share from each of them on.
  """
  sample = stats.CensoredData(uncensored=steps[solved], right=steps[~solved])
  curve = stats.ecdf(sample).sf
  return curve.quantiles, curve.probabilities


def median_steps(steps: np.ndarray, solved: np.ndarray) -> float:
  """The first step by which half of the seeds have solved a task; NaN if fewer have.

  Args:
    steps: as in `survival_curve`.
    solved: as in `survival_curve`.
  """
  at, share = survival_curve(steps, solved)
  # The share is a product of fractions, which may round to just above a half.
  return float(min(at[share <= 0.5 + _EPSILON], default=math.nan))


def log_rank_p_values(
  steps: Sequence[np.ndarray], solved: Sequence[np.ndarray]
) -> list[float]:
  """Log-rank tests of the first row against the others, with Holm's correction.

  The correction is over all pairs of rows.

  Args:
    steps: as in `survival_curve`, one array per row.
    solved: as in `survival_curve`.

  Returns:
    p-values; NaN for the first row.
  """
  samples = [
    stats.CensoredData(uncensored=x[done], right=x[~done])
    for x, done in zip(steps, solved, strict=True)
  ]
  # If no seed of two rows has solved the task, their p-value is NaN.
  with np.errstate(invalid="ignore"):
    pairs = itertools.combinations(samples, 2)
    p = [float(stats.logrank(*pair).pvalue) for pair in pairs]
  return [math.nan, *holm(p)[: len(samples) - 1]]


def holm(p_values: Sequence[float]) -> list[float]:
  """Holm's correction of the p-values of a family of tests (Holm 1979).

  NaN is not a test and stays NaN.

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
  """A difference of BLEU between systems, with its 95 % interval and p-value."""

  mean: float
  low: float
  high: float
  p_value: float


def bleu(counts: np.ndarray, effective_order: bool = False) -> np.ndarray:
  """Corpus BLEU of summed sentence statistics [..., 10], with smoothing 'exp'.

  SacreBLEU's function takes one corpus at a time, but a bootstrap has thousands. The
  results agree up to rounding.

  Args:
    counts: matching n-grams of order 1 to 4, all n-grams of order 1 to 4, the length
      of the output, and the length of the reference, as in SacreBLEU.
    effective_order: whether to average only over orders of n-grams that the output has.

  Returns:
    BLEU [...], from 0 to 100.
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
  """BLEU of one system minus that of another, each a mean over K seeds.

  Paired bootstrap (Koehn 2004): sentences are drawn with replacement, the same ones
  for both systems and for all seeds. SacreBLEU's test does not support seeds; for one
  seed it differs only in the draws. With difference δ over all sentences and δ_r in
  draw r,

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
  """Whether statistics [N, 10] of several runs have references of equal lengths.

  If so, they belong to the same sentences.
  """
  first = systems[0][:, -1]
  return all(np.array_equal(first, system[:, -1]) for system in systems[1:])
