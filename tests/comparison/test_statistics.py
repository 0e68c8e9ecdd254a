"""Intervals and tests: cases counted by hand, coverage on simulated data."""

import itertools
import math

import numpy as np
import pytest
import sacrebleu
from sacrebleu import significance
from scipy import stats

from comparison.analysis import statistics


def test_an_unbounded_interval_is_students():
  # s = 1, t(2) at 97.5 % = 4.3027.
  low, high = statistics.mean_interval([4.0, 5.0, 6.0])
  half = 4.302652729911275 / math.sqrt(3)
  assert (low, high) == pytest.approx((5 - half, 5 + half))
  assert statistics.mean_interval([1.0, 9.0])[0] == 0.0  # Cut at 0.
  # Not cut: the loss of a task of its own may be negative. By `scipy.stats.t`.
  values = [-1.6, -1.5, 0.2]
  ends = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
  assert statistics.mean_interval(values) == pytest.approx(ends)
  assert all(map(math.isnan, statistics.mean_interval([0.5], 1.0, 100)))


def test_a_bounded_interval_stays_within_its_range_and_holds_the_mean():
  low, high = statistics.mean_interval([0.9, 0.95, 1.0], 1.0)
  assert 0 < low < 0.95 < high < 1
  # Far from both ends it is the common one.
  values = [49.9, 50.0, 50.1]
  common = statistics.mean_interval(values)
  assert statistics.mean_interval(values, 100.0) == pytest.approx(
    common, rel=1e-4
  )


def test_no_interval_is_narrower_than_the_test_set_allows():
  """Three seeds that are all right on 100 rows: Wilson's for 100 of 100."""
  z = 1.959963984540054
  assert statistics.mean_interval([1.0] * 3, 1.0) == (1.0, 1.0)
  low, high = statistics.mean_interval([1.0] * 3, 1.0, cases=100)
  assert low == pytest.approx(100 / (100 + z**2))
  assert high == pytest.approx(1.0)
  wide = statistics.mean_interval([0.2, 0.5, 0.9], 1.0)
  assert statistics.mean_interval([0.2, 0.5, 0.9], 1.0, cases=10**6) == wide


@pytest.mark.parametrize("upper", [1.0, 100.0])
def test_the_rows_of_a_test_set_bound_any_share(upper):
  """Wilson's for 0, 50 and 100 of 100 in the unit of the metric."""
  z = 1.959963984540054
  for share in (0.0, 0.5, 1.0):
    found = statistics.mean_interval([share * upper] * 3, upper, cases=100)
    middle = (share + z * z / 200) / (1 + z * z / 100)
    spread = math.sqrt(share * (1 - share) / 100 + z * z / 40_000)
    half = z * spread / (1 + z * z / 100)
    expected = [upper * (middle - half), upper * (middle + half)]
    np.testing.assert_allclose(found, expected, atol=1e-9)


def test_sentences_are_the_same_if_their_references_are_as_long():
  one, other = np.ones((3, 10)), np.ones((3, 10))
  other[:, :-1] = 2
  assert statistics.are_paired([one, other])
  other[1, -1] = 2
  assert not statistics.are_paired([one, one, other])
  assert not statistics.are_paired([one, one[:2]])


def test_wilson_by_hand():
  z, share, n = 1.959963984540054, 5 / 8, 8
  middle = (share + z * z / (2 * n)) / (1 + z * z / n)
  spread = math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
  half = z * spread / (1 + z * z / n)
  assert statistics.wilson(5, 8) == pytest.approx(
    (middle - half, middle + half)
  )


def table_of(means, residuals):
  """Values [R, S] with an effect of the seed that is larger than all others."""
  values = np.array(means)[:, None] + np.array(residuals, float)
  return values + 100 * np.arange(values.shape[1])


def test_means_are_compared_by_tukeys_test():
  """Residual variance 6 / 4, so q = |difference| / √(1.5 / 3).

  Published tables have q = 5.04 at 5 % for three means and four degrees of freedom.
  """
  residuals = [[1, -1, 0], [-1, 0, 1], [0, 1, -1]]
  critical = 5.040 * math.sqrt(0.5)
  found = statistics.compare_with_first(table_of([0, -critical, -1], residuals))
  np.testing.assert_allclose(found.p_values[1], 0.05, atol=2e-4)
  assert found.p_values[2] > 0.5
  np.testing.assert_allclose(found.difference, [0, -critical, -1], atol=1e-9)
  assert found.high[1] == pytest.approx(0, abs=2e-3)
  assert found.low[2] == pytest.approx(-1 - critical, abs=2e-3)
  assert "Tukey" in found.test
  assert "4 degrees" in found.test


def test_two_rows_are_students_paired_test():
  """Differences 0.1, 0.2, 0.3: t = 0.2 / (0.1 / √3) = 3.4641, 2 degrees."""
  values = np.array([[1.0, 5.0, 9.0], [1.1, 5.2, 9.3]])
  t = 2 * math.sqrt(3)
  # Of Student's t with 2 degrees: p = 1 − t / √(t² + 2).
  expected = 1 - t / math.sqrt(t * t + 2)
  for compare in (
    statistics.compare_with_first,
    statistics.compare_with_reference,
  ):
    found = compare(values)
    assert found.p_values[1] == pytest.approx(expected)
    assert found.difference[1] == pytest.approx(0.2)
    # t(2) at 97.5 % = 4.3027.
    half = 4.302652729911275 * 0.1 / math.sqrt(3)
    assert found.low[1] == pytest.approx(0.2 - half)
    assert found.high[1] == pytest.approx(0.2 + half)


def test_where_variances_differ_each_pair_has_its_own():
  """Two rows vary a hundred times as much; all six pairs are corrected."""
  generator = np.random.default_rng(0)
  spread = np.array([0.01, 0.01, 1.0, 1.0])[:, None]
  values = spread * generator.normal(size=(4, 8))
  values[1] -= 0.05
  found = statistics.compare_with_first(values)
  assert "Bartlett" in found.test
  pair = stats.ttest_rel(values[1], values[0])
  assert found.p_values[1] == pytest.approx(6 * pair.pvalue)
  low, high = pair.confidence_interval(1 - 0.05 / 6)
  assert (found.low[1], found.high[1]) == pytest.approx((low, high))
  assert (found.p_values[2:] > 0.5).all()
  declared = statistics.compare_with_reference(values)
  assert declared.p_values[1] == pytest.approx(3 * pair.pvalue)


def test_rows_with_other_seeds_are_compared_over_common_ones():
  nan = math.nan
  values = np.array(
    [[1, 2, 4, 3, 5], [2, 4, 5, nan, nan], [nan, nan, 1, 1, 4.5], [nan] * 5]
  )
  found = statistics.compare_with_first(values)
  pairs = [
    stats.ttest_rel(values[1, :3], values[0, :3]).pvalue,
    stats.ttest_rel(values[2, 2:], values[0, 2:]).pvalue,
  ]
  # Of the six pairs, the others have no three common seeds.
  expected = statistics.holm(pairs)
  np.testing.assert_allclose(found.p_values, [nan, *expected, nan])
  assert "different seeds" in found.test


@pytest.mark.parametrize(
  "values",
  [
    [[1.0, 2.0], [2.0, 4.0]],  # Two seeds.
    [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]],  # The differences do not vary.
    [[0.998, 0.997, 0.998]] * 2,  # They are 0.
    [[1.0], [2.0]],
  ],
)
def test_no_p_without_variance(values):
  for compare in (
    statistics.compare_with_first,
    statistics.compare_with_reference,
  ):
    found = compare(np.array(values))
    assert np.isnan(found.p_values).all()
    assert math.isnan(found.low[1])
    assert not math.isnan(found.difference[1])


@pytest.mark.parametrize("unit", [1e-11, 1e8])
def test_tests_do_not_depend_on_the_unit_of_a_metric(unit):
  values = np.array([[0.1, 0.2, 0.4, 0.3], [0.2, 0.5, 0.6, 0.5]])
  constant = values[0] + np.array([[0.0], [0.1]])
  t = stats.ttest_rel(values[1], values[0])
  found = statistics.compare_with_reference(unit * values)
  assert found.p_values[1] == pytest.approx(t.pvalue)
  ends = found.low[1], found.high[1]
  assert ends == pytest.approx(unit * np.array(t.confidence_interval()))
  declared = statistics.compare_with_reference(unit * constant)
  assert math.isnan(declared.p_values[1])
  # 2 of the 16 orders are at least as extreme: the observed one and its reverse.
  found = statistics.p_by_shuffles(unit * values, math.inf)
  assert found[1] == 2 / 16


@pytest.mark.parametrize("diverged", [1e3, 1e13])
def test_a_diverged_row_does_not_change_the_test_of_another(diverged):
  values = np.array(
    [[0.1, 0.2, 0.4, 0.3], [0.2, 0.5, 0.6, 0.5], [1.0, 3, 2, 5]]
  )
  values[2] *= diverged
  t = stats.ttest_rel(values[1], values[0])
  found = statistics.compare_with_reference(values)
  # Holm's correction doubles the smaller of two p-values.
  assert found.p_values[1] == pytest.approx(2 * t.pvalue)
  assert found.difference[1] == pytest.approx(0.2)


def shuffled_by_hand(values, threshold, all_pairs=True):
  """p of `p_by_shuffles` in plain Python, for a table without gaps."""
  rows, seeds = range(len(values)), range(len(values[0]))

  def scores(kind):
    table = {}
    for s in seeds:
      for r in rows:
        value, solved = values[r][s], values[r][s] >= threshold
        table[r, s] = solved if kind == "solved" else min(value, threshold)
      mean = sum(table[r, s] for r in rows) / len(rows)
      table |= {(r, s): table[r, s] - mean for r in rows}
    size = math.sqrt(sum(x * x for x in table.values()) / len(table))
    return {place: x / size for place, x in table.items()} if size else None

  kinds = [x for x in map(scores, ("value", "solved")) if x]

  def distance(order, i, j):
    return max(
      abs(sum(kind[order[s][i], s] - kind[order[s][j], s] for s in seeds))
      for kind in kinds
    )

  permutations = list(itertools.permutations(rows))
  largest = [
    max(
      distance(order, i, j) for i in (rows if all_pairs else [0]) for j in rows
    )
    for order in itertools.product(permutations, repeat=len(seeds))
  ]
  same = [permutations[0]] * len(seeds)
  return [
    sum(x >= distance(same, 0, j) - 1e-9 for x in largest) / len(largest)
    for j in rows[1:]
  ]


@pytest.mark.parametrize("all_pairs", [True, False])
@pytest.mark.parametrize("threshold", [math.inf, 0.95])
@pytest.mark.parametrize(
  "values",
  [
    [[0.9, 0.8, 0.7], [0.5, 0.4, 0.6], [0.1, 0.2, 0.3]],
    [[1.0, 0.98, 0.96], [1.0, 0.3, 0.99], [0.2, 0.3, 0.1]],
    [[0.94, 0.93, 0.92, 0.5], [0.3, 0.0, 0.2, 0.4], [0.3, 1.0, 0.1, 0]],
  ],
)
def test_shuffles_by_hand(values, threshold, all_pairs):
  found = statistics.p_by_shuffles(np.array(values), threshold, all_pairs)
  assert math.isnan(found[0])
  expected = shuffled_by_hand(values, threshold, all_pairs)
  assert found[1:] == pytest.approx(expected)


def test_shuffles_that_are_drawn_agree_with_all_of_them(monkeypatch):
  values = np.random.default_rng(3).random((3, 5))
  values += np.array([1.1, 0.4, 0.0])[:, None]
  exact = statistics.p_by_shuffles(values, 0.95)
  assert statistics.SHUFFLES > 6**5
  monkeypatch.setattr(statistics, "SHUFFLES", 6**5)
  drawn = statistics.p_by_shuffles(values, 0.95)
  np.testing.assert_allclose(drawn[1:], exact[1:], atol=0.02)
  assert (drawn[1:] != exact[1:]).any()
  assert drawn[1:].min() > 0


def test_rows_without_common_seeds_are_not_compared():
  nan = math.nan
  values = np.array(
    [[1, 1, 1, 1, nan], [0, 0, 0, nan, nan], [nan] * 3 + [0, 0]]
  )
  found = statistics.p_by_shuffles(values, 0.95)
  # Both of the first have the seeds 0, 1, 2: 2 of 8 shuffles are so far apart.
  np.testing.assert_allclose(found, [nan, 2 / 8, nan])


def test_differences_of_shares_are_newcombes():
  """Table II of Newcombe (1998), method 10: 56 of 70 and 48 of 80."""
  found = statistics.share_difference(56, 70, 48, 80)
  assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_steps_are_those_of_freireichs_trial():
  """Remission with and without 6-MP (Freireich 1963), in every book on survival.

  Medians are 23 and 8 weeks, and the log-rank statistic is 16.79.
  """
  treated = (
    "6 6 6 6+ 7 9+ 10 10+ 11+ 13 16 17+ 19+ 20+ 22 23 25+ 32+ 32+ 34+ 35+"
  )
  placebo = "1 1 2 2 3 4 4 5 5 8 8 8 8 11 11 12 12 15 17 22 23"
  texts = [text.split() for text in (treated, placebo)]
  steps = [np.array([float(x.strip("+")) for x in text]) for text in texts]
  ended = [np.array(["+" not in x for x in text]) for text in texts]
  at, share = statistics.survival_curve(steps[0], ended[0])
  expected = {6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 22: 0.538, 23: 0.448}
  table = dict(zip(at, share, strict=True))
  for week, value in expected.items():
    assert table[week] == pytest.approx(value, abs=5e-4)
  assert statistics.median_steps(steps[0], ended[0]) == 23
  # The product of 23/24, 22/23, … 12/13 is a half, but floats exceed it.
  numbers = np.arange(1.0, 25)
  assert statistics.median_steps(numbers, numbers < 24) == 12
  _, p = statistics.log_rank_p_values(steps, ended)
  assert p == pytest.approx(stats.chi2.sf(16.79, 1), rel=0.01)
  # Three rows have three pairs.
  three = statistics.log_rank_p_values([*steps, steps[1]], [*ended, ended[1]])
  np.testing.assert_allclose(three, [math.nan, 3 * p, 3 * p], rtol=1e-9)
  none = np.zeros(21, bool)
  never = statistics.log_rank_p_values([steps[0], steps[1]], [none, none])
  assert not never[1] < 1


def test_holm_by_hand():
  found = statistics.holm([0.01, 0.04, math.nan, 0.03, 0.5])
  np.testing.assert_allclose(found, [0.04, 0.09, np.nan, 0.09, 0.5])
  assert statistics.holm([]) == []


@pytest.mark.parametrize(
  ("draw", "mean", "upper"),
  [
    (lambda g, n: g.normal(5.0, 1.0, n), 5.0, math.inf),
    (lambda g, n: g.beta(9.0, 1.0, n), 0.9, 1.0),
    (lambda g, n: g.beta(5.0, 5.0, n), 0.5, 1.0),
  ],
)
@pytest.mark.parametrize("seeds", [3, 8])
def test_intervals_of_means_hold_the_true_mean(draw, mean, upper, seeds):
  generator = np.random.default_rng(0)
  held = 0
  for _ in range(300):
    low, high = statistics.mean_interval(draw(generator, seeds), upper)
    held += low <= mean <= high
  assert held / 300 >= 0.93


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_intervals_of_counts_hold_the_true_share(share):
  """Wilson's coverage swings about 95 % with n; over n it is close."""
  held = []
  for trials in range(5, 30, 2):
    intervals = [statistics.wilson(n, trials) for n in range(trials + 1)]
    holds = [low <= share <= high for low, high in intervals]
    held.append(stats.binom.pmf(range(trials + 1), trials, share) @ holds)
  assert np.mean(held) >= 0.94


WORDS = [f"w{i}" for i in range(40)]


def references(num, length=(1, 15)):
  generator = np.random.default_rng(0)
  return [
    " ".join(generator.choice(WORDS, generator.integers(*length)))
    for _ in range(num)
  ]


def translated(lines, wrong, seed=0):
  """Outputs in which a share of the words is wrong; some end early."""
  generator = np.random.default_rng(seed)
  outputs = []
  for reference in lines:
    words = np.array(reference.split())
    is_wrong = generator.random(len(words)) < wrong
    changed = np.where(is_wrong, generator.choice(WORDS, len(words)), words)
    outputs.append(" ".join(changed[: generator.integers(1, 20)]))
  return outputs


def counts(lines, wrong, seed=0):
  """Statistics of the sentences of such outputs [N, 10]."""
  metric = sacrebleu.BLEU(effective_order=True)
  scores = [
    metric.sentence_score(output, [reference])
    for output, reference in zip(
      translated(lines, wrong, seed), lines, strict=True
    )
  ]
  return np.array(
    [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores], float
  )


@pytest.mark.parametrize("effective_order", [False, True])
@pytest.mark.parametrize(
  ("wrong", "length"), [(0.2, (1, 15)), (0.9, (4, 9)), (1.0, (1, 3))]
)
def test_bleu_is_sacrebleus(wrong, length, effective_order):
  """Sums with every order, without right 4-grams, without any 4-gram, empty, and
  longer than the reference."""
  found = counts(references(30, length), wrong)
  sums = [found[i : i + n].sum(0) for i in range(20) for n in (1, 3, 10)]
  sums += [np.zeros(10), np.array([0] * 9 + [5]), np.r_[sums[2][:9], 5]]
  expected = [
    sacrebleu.BLEU.compute_bleu(
      correct=one[:4].tolist(),
      total=one[4:8].tolist(),
      sys_len=int(one[8]),
      ref_len=int(one[9]),
      smooth_method="exp",
      effective_order=effective_order,
    ).score
    for one in sums
  ]
  np.testing.assert_allclose(
    statistics.bleu(np.stack(sums), effective_order), expected, atol=1e-9
  )
  assert (max(expected) > 0) == (effective_order or length[1] > 4)


@pytest.mark.parametrize("wrong", [0.3, 0.32, 0.5])
def test_one_seed_each_is_sacrebleus_paired_test(wrong):
  """Other draws, so p agrees within its own error of a thousand draws."""
  lines = references(120)
  _, scores = significance.PairedTest(
    [
      ("other", translated(lines, 0.3)),
      ("system", translated(lines, wrong, 1)),
    ],
    {"BLEU": sacrebleu.BLEU(references=[lines])},
    references=None,
    test_type="bs",
    n_samples=1000,
  )()
  other, system = scores["BLEU"]
  found = statistics.bleu_difference(
    counts(lines, wrong, 1)[None], counts(lines, 0.3)[None]
  )
  assert found.mean == pytest.approx(system.score - other.score)
  assert found.low < found.mean < found.high
  assert found.p_value == pytest.approx(system.p_value, abs=0.06)


def test_bleu_between_seeds_is_antisymmetric_and_of_itself_nothing():
  runs = np.stack([counts(references(50), wrong) for wrong in (0.2, 0.4)])
  same = statistics.bleu_difference(runs, runs)
  assert same == (0.0, 0.0, 0.0, 1.0)
  one = statistics.bleu_difference(runs[:1], runs[1:])
  other = statistics.bleu_difference(runs[1:], runs[:1])
  assert other.mean == pytest.approx(-one.mean)
  assert other.low == pytest.approx(-one.high)
  assert other.p_value == one.p_value


def test_a_seed_that_no_row_has_changes_nothing(recwarn):
  values = np.random.default_rng(0).normal(size=(3, 5))
  p = statistics.p_by_shuffles(values, math.inf)
  absent = np.insert(values, 2, math.nan, axis=1)
  np.testing.assert_array_equal(statistics.p_by_shuffles(absent, math.inf), p)
  assert not recwarn
