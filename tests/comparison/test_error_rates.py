"""What docs/comparing.md says of equal rows: at most 5.5 % of tables claim anything."""

import numpy as np
import pytest
from scipy import stats

from comparison.analysis import statistics
from tests.comparison import error_rates

TABLES = 500


@pytest.mark.thorough
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("kind", error_rates.KINDS)
@pytest.mark.parametrize("rows", error_rates.ROWS)
@pytest.mark.parametrize("seeds", error_rates.SEEDS)
def test_equal_rows_are_told_apart_in_one_table_of_twenty(
  kind, rows, seeds, declared, monkeypatch
):
  error_rates.quicken(monkeypatch)
  found = error_rates.rate(kind, rows, seeds, TABLES, is_declared=declared)
  assert found <= stats.binom.ppf(0.9999, TABLES, 0.05) / TABLES


@pytest.mark.parametrize("kind", error_rates.KINDS)
def test_a_small_table_keeps_its_rate(kind, monkeypatch):
  error_rates.quicken(monkeypatch)
  found = error_rates.rate(kind, 4, 4, 100)
  assert found <= stats.binom.ppf(0.9999, 100, 0.05) / 100


def test_a_better_row_of_ten_is_found_with_five_seeds(monkeypatch):
  """Paired tests with Holm's correction find a quarter of its nine differences."""
  error_rates.quicken(monkeypatch)
  _, found = error_rates.share_found(error_rates.means, 10, 5, 100, above=2.0)
  assert found >= 0.3


def test_rows_that_are_far_away_hide_no_difference(monkeypatch):
  """A table with two groups of equal rows is right about each of them."""
  error_rates.quicken(monkeypatch)
  generator = np.random.default_rng(0)
  wrong = 0
  for _ in range(100):
    values = generator.normal(size=(6, 5))
    values[3:] -= 20
    found = statistics.compare_with_first(
      values[np.argsort(-values.mean(axis=1))]
    )
    wrong += bool((found.p_values[1:3] < 0.05).any())
    assert (found.p_values[3:] < 0.05).all()
  assert wrong <= stats.binom.ppf(0.9999, 100, 0.05)
