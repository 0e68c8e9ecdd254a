"""Simulates how often a report claims a difference between equal rows.

    python -m tests.comparison.error_rates

It prints the tables of docs/comparing.md in half an hour.
"""

import functools

import numpy as np

from comparison.analysis import statistics
from comparison.analysis import summary as summary_lib

ROWS, SEEDS = (3, 10, 26), (3, 5, 8)
THRESHOLD = 0.95


def means(generator, rows, seeds):
  """Draws normal values, with a three times as large effect of the seed."""
  values = generator.normal(size=(rows, seeds))
  return values + 3 * generator.normal(size=seeds)


def counts(generator, rows, seeds):
  """Draws accuracies of runs, half of which solve the task; others are at chance."""
  return np.where(generator.random((rows, seeds)) < 0.5, 1.0, 0.1)


def mixed(generator, rows, seeds):
  """Draws accuracies: half solve the task, others are uniform, 10 % diverge."""
  kinds = generator.random((rows, seeds))
  values = np.where(kinds < 0.5, 1.0, generator.random((rows, seeds)))
  return np.where(kinds > 0.9, 0.0, values)


def diverged(generator, rows, seeds):
  """Draws normal values, 10 % of which diverge and get the worst value."""
  values = generator.normal(size=(rows, seeds))
  is_diverged = generator.random((rows, seeds)) < 0.1
  return np.where(is_diverged, values.min(), values)


KINDS = {"means": means, "diverged": diverged, "counts": counts, "mixed": mixed}


def p_values(values, threshold=None, is_declared=False):
  """Computes p-values of values [R, S] against the best row.

  With `is_declared`, the reference is the first row of `values`.
  """
  if threshold is None:
    order = np.argsort(-values.mean(axis=1))
    table = values if is_declared else values[order]
    compare = statistics.compare_with_first
    compare = statistics.compare_with_reference if is_declared else compare
    return compare(table).p_values
  solved = (values >= threshold).sum(axis=1)
  order = np.lexsort([-values.mean(axis=1), -solved])
  table = values if is_declared else values[order]
  return statistics.p_by_shuffles(table, threshold, not is_declared)


def share_found(draw, rows, seeds, tables, *, above=0.0, **options):
  """Returns the share of tables with a difference, and of differences found.

  The first row is better by `above`.
  """
  generator = np.random.default_rng(0)
  claims, power = 0, 0.0
  for _ in range(tables):
    values = draw(generator, rows, seeds)
    values[0] += above
    p = p_values(values, **options)[1:]
    claims += bool((p < summary_lib.DIFFERENT).any())
    power += (p < summary_lib.DIFFERENT).mean()
  return claims / tables, power / tables


def rate(kind, rows, seeds, tables, **options):
  """Returns the share of tables of equal rows with a claimed difference."""
  threshold = {"means": None, "diverged": np.inf}.get(kind, THRESHOLD)
  draw = KINDS[kind]
  return share_found(draw, rows, seeds, tables, threshold=threshold, **options)[
    0
  ]


class _Quick:
  """Caches quantiles of the studentized range, which SciPy integrates for each value.

  A test of p < 5 % needs only one quantile.
  """

  exact = statistics.stats.studentized_range

  @staticmethod
  @functools.cache
  def ppf(level, rows, degrees):
    return float(_Quick.exact.ppf(level, rows, degrees))

  @staticmethod
  def sf(values, rows, degrees):
    critical = _Quick.ppf(statistics.LEVEL, rows, degrees)
    return np.where(values > critical, 0.01, 0.5)


def quicken(monkeypatch=None):
  """Makes one table take milliseconds, with a tenth of the shuffles."""
  changes = (
    (statistics.stats, "studentized_range", _Quick),
    (statistics, "SHUFFLES", 999),
  )
  for place, name, value in changes:
    if monkeypatch is None:
      setattr(place, name, value)
    else:
      monkeypatch.setattr(place, name, value)


def main():
  """Prints the tables."""
  quicken()
  for declared in (False, True):
    for kind in KINDS:
      for rows in ROWS:
        rates = [
          100 * rate(kind, rows, seeds, 400, is_declared=declared)
          for seeds in SEEDS
        ]
        cells = " | ".join(f"{x:.1f} %" for x in rates)
        print(f"| {kind}, declared {declared}, {rows} | {cells} |", flush=True)
  for seeds in SEEDS:
    for declared in (False, True):
      found = share_found(
        means, 10, seeds, 400, above=2.0, is_declared=declared
      )[1]
      print(
        f"power, 10 × {seeds}, declared {declared}: {found:.2f}", flush=True
      )


if __name__ == "__main__":
  main()
