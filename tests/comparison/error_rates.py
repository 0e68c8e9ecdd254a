"""How often a report claims a difference where all rows are equal, by simulation.

    python -m tests.comparison.error_rates

prints the tables of docs/comparing.md; it takes half an hour.
"""

import functools

import numpy as np

from comparison.analysis import statistics
from comparison.analysis import summary as summary_lib

ROWS, SEEDS = (3, 10, 26), (3, 5, 8)
THRESHOLD = 0.95


def means(generator, rows, seeds):
  """Normal values, with an effect of the seed that is three times as large."""
  values = generator.normal(size=(rows, seeds))
  return values + 3 * generator.normal(size=seeds)


def counts(generator, rows, seeds):
  """Half of the runs solve the task, the others are at chance."""
  return np.where(generator.random((rows, seeds)) < 0.5, 1.0, 0.1)


def mixed(generator, rows, seeds):
  """Half of the runs solve the task, the others have any accuracy; 10 % diverge."""
  kinds = generator.random((rows, seeds))
  values = np.where(kinds < 0.5, 1.0, generator.random((rows, seeds)))
  return np.where(kinds > 0.9, 0.0, values)


def diverged(generator, rows, seeds):
  """Normal values; 10 % of the runs diverge, and are the worst of the table."""
  values = generator.normal(size=(rows, seeds))
  is_diverged = generator.random((rows, seeds)) < 0.1
  return np.where(is_diverged, values.min(), values)


KINDS = {"means": means, "diverged": diverged, "counts": counts, "mixed": mixed}


def p_values(values, threshold=None, is_declared=False):
  """p against the first row of the report, of values [R, S].

  With `is_declared`, against the first row of `values`.
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
  """Shares of tables with a difference, and of the differences that are found.

  The first row is better by `above`.
  """
  generator = np.random.default_rng(0)
  told, found = 0, 0.0
  for _ in range(tables):
    values = draw(generator, rows, seeds)
    values[0] += above
    p = p_values(values, **options)[1:]
    told += bool((p < summary_lib.DIFFERENT).any())
    found += (p < summary_lib.DIFFERENT).mean()
  return told / tables, found / tables


def rate(kind, rows, seeds, tables, **options):
  """The share of tables of equal rows in which at least one is told apart."""
  threshold = {"means": None, "diverged": np.inf}.get(kind, THRESHOLD)
  draw = KINDS[kind]
  return share_found(draw, rows, seeds, tables, threshold=threshold, **options)[
    0
  ]


class _Quick:
  """The studentized range, which SciPy integrates anew for every value.

  It is asked whether p is below 5 %, for which one quantile is enough.
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
