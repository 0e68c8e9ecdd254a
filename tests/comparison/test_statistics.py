"""Intervals and tests: cases counted by hand, coverage on simulated data."""

import math

import numpy as np
import pytest
import sacrebleu
from sacrebleu import significance

from comparison.analysis import statistics


def test_an_unbounded_interval_is_students():
  # s = 1, t(2) at 97.5 % = 4.3027.
  low, high = statistics.mean_interval([4.0, 5.0, 6.0])
  half = 4.302652729911275 / math.sqrt(3)
  assert (low, high) == pytest.approx((5 - half, 5 + half))
  assert statistics.mean_interval([1.0, 9.0])[0] == 0.0  # Cut at 0.


def test_one_value_has_no_interval():
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


def test_wilson_by_hand():
  z, share, n = 1.959963984540054, 5 / 8, 8
  middle = (share + z * z / (2 * n)) / (1 + z * z / n)
  spread = math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
  half = z * spread / (1 + z * z / n)
  assert statistics.wilson(5, 8) == pytest.approx(
    (middle - half, middle + half)
  )


def test_means_are_compared_by_seed():
  """Differences 0.1, 0.2, 0.3: t = 0.2 / (0.1 / √3) = 3.4641, 2 degrees."""
  ours = {0: 1.1, 1: 5.2, 2: 9.3}
  theirs = {0: 1.0, 1: 5.0, 2: 9.0, 3: 100.0}
  t = 2 * math.sqrt(3)
  # Of Student's t with 2 degrees: p = 1 − t / √(t² + 2).
  expected = 1 - t / math.sqrt(t * t + 2)
  assert statistics.p_of_means(ours, theirs) == pytest.approx(expected)


def test_means_without_common_seeds_are_compared_by_welch():
  p = statistics.p_of_means({0: 1.0, 1: 2.0, 2: 3.0}, {5: 2.0, 6: 3.0, 7: 4.0})
  # t = 1 / √(2/3), 4 degrees of freedom.
  assert p == pytest.approx(0.28786413472669, abs=1e-6)


@pytest.mark.parametrize(
  ("ours", "theirs", "expected"),
  [
    ({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0}, 1.0),
    ({0: 2.0, 1: 3.0}, {0: 1.0, 1: 2.0}, 0.0),
    ({0: 1.0}, {0: 2.0}, math.nan),
    ({0: 1.0, 1: 1.0}, {5: 1.0, 6: 1.0}, 1.0),
  ],
)
def test_means_at_the_edges(ours, theirs, expected):
  p = statistics.p_of_means(ours, theirs)
  assert p == pytest.approx(expected, nan_ok=True)


def test_counts_by_hand():
  """5 of 5 against 0 of 5: 2 of the C(10, 5) = 252 tables are so far apart."""
  assert statistics.p_of_counts(5, 5, 0, 5) == pytest.approx(2 / 252)
  assert statistics.p_of_counts(3, 3, 0, 3) == pytest.approx(0.1)


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
  for _ in range(1000):
    low, high = statistics.mean_interval(draw(generator, seeds), upper)
    held += low <= mean <= high
  assert held / 1000 >= 0.94


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_intervals_of_counts_hold_the_true_share(share):
  """Wilson's coverage swings about 95 % with n; over n it is close."""
  generator = np.random.default_rng(0)
  held = []
  for trials in range(5, 30):
    for solved in generator.binomial(trials, share, 50):
      low, high = statistics.wilson(solved, trials)
      held.append(low <= share <= high)
  assert np.mean(held) >= 0.94


def test_equal_rows_are_told_apart_in_one_table_of_twenty():
  """Holm keeps the rate of false differences over a table at 5 %."""
  generator = np.random.default_rng(0)
  wrong = 0
  for _ in range(200):
    table = generator.normal(size=(20, 5))
    best = dict(enumerate(table[0]))
    p = [statistics.p_of_means(dict(enumerate(x)), best) for x in table[1:]]
    wrong += min(statistics.holm(p)) < 0.05
  assert wrong / 200 <= 0.08


def test_a_model_of_row_and_seed_is_that_of_statsmodels():
  """statsmodels 0.15.0: `ols("y ~ C(row) + C(seed)")`, `multipletests(…, "holm")`."""
  values = np.array(
    [
      [2.391, 2.395, 2.387, 2.382],
      [2.400, 2.413, 2.406, 2.373],
      [2.432, 2.426, 2.416, 2.399],
      [2.453, 2.486, 2.428, 2.410],
      [2.383, 2.430, 2.381, 2.381],
    ]
  )
  found = statistics.row_model(values)
  expected = [0.7186125805, 0.0308293997, 0.00038479359, 0.7186125805]
  np.testing.assert_allclose(found.p_values, expected, rtol=1e-6)
  assert found.degrees == 12


@pytest.mark.parametrize(("rows", "seeds"), [(3, 3), (10, 3), (10, 5), (28, 3)])
def test_equal_rows_are_told_apart_in_one_model_of_twenty(rows, seeds):
  """A seed adds the same to all rows, and what is said of variances holds too."""
  generator = np.random.default_rng(0)
  wrong = warned = 0
  for _ in range(500):
    seed_effects = 3 * generator.normal(size=seeds)
    found = statistics.row_model(
      generator.normal(size=(rows, seeds)) + seed_effects
    )
    wrong += min(found.p_values) < 0.05
    warned += found.p_variances < 0.05
  assert wrong / 500 <= 0.05
  assert warned / 500 <= 0.05


def test_a_model_of_ten_rows_finds_what_pairs_of_three_seeds_miss():
  """The first is four standard deviations above nine others: all nine are told."""
  generator = np.random.default_rng(0)
  by_model = by_pairs = 0
  for _ in range(100):
    values = generator.normal(size=(10, 3)) + generator.normal(size=3)
    values[0] += 4
    by_model += max(statistics.row_model(values).p_values) < 0.05
    first, *others = (dict(enumerate(row)) for row in values)
    p = [statistics.p_of_means(row, first) for row in others]
    by_pairs += max(statistics.holm(p)) < 0.05
  assert by_model >= 90
  assert by_pairs <= 10


def test_variances_that_differ_are_found():
  """Half of the rows vary five times as much, so that their pooled t misleads."""
  generator = np.random.default_rng(0)
  spread = np.repeat([1.0, 5.0], 5)[:, None]
  found = [
    statistics.row_model(spread * generator.normal(size=(10, 8))).p_variances
    for _ in range(100)
  ]
  assert np.mean(np.array(found) < 0.05) >= 0.9


def test_rows_that_are_alike_in_all_seeds_have_a_model():
  same = statistics.row_model(np.ones((3, 2)))
  assert same.p_values == [1.0, 1.0]
  assert not same.p_variances < 0.05
  shifted = statistics.row_model(np.array([[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]))
  assert shifted.p_values == pytest.approx([1.0, 0.0])


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
  """Sums with every order, without right 4-grams, without any 4-gram, and empty."""
  found = counts(references(30, length), wrong)
  sums = [found[i : i + n].sum(0) for i in range(20) for n in (1, 3, 10)]
  sums += [np.zeros(10), np.array([0] * 9 + [5])]
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
