"""BLEU of each row against the best row, paired over sentences: a table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from comparison.records import Record
from reports import bootstrap, quality, summary, words
from reports.bootstrap import Difference
from reports.rows import Table
from reports.summary import Summary

HEADS = ("seeds of both", "difference of BLEU", "its 95 % interval", "its p")
"""Titles of the columns behind those that name a row."""


class Pair(NamedTuple):
  """A row against the best one.

  Attributes:
    row: not the best.
    seeds: how many both have; 0 where nothing is paired.
    difference: of its BLEU to that of the best; None where nothing is paired.
  """

  row: Summary
  seeds: int
  difference: Difference | None


class Pairs(NamedTuple):
  """Every row against the best one.

  Attributes:
    best: the row with the best mean BLEU.
    pairs: the others that have something to show, in their order.
  """

  best: Summary
  pairs: list[Pair]


def pairs(summaries: Sequence[Summary]) -> Pairs | None:
  """Compares all rows of a task with the best, over the seeds that both have.

  Args:
    summaries: of a task.

  Returns:
    The comparison; None where the task is not judged by BLEU, or where nothing is
    paired: records of older versions have no sentences.
  """
  done = [run for one in summaries for run in one.done]
  if summary.headline(done) != quality.BLEU:
    return None
  best = summary.best(summaries, quality.BLEU)
  theirs = _statistics(best) if best else {}
  if best is None or not theirs:
    return None
  drawn = bootstrap.draws(len(next(iter(theirs.values()))))
  effective = _has_effective_order(best.done[0])
  found = [
    _pair(one, theirs, drawn, effective)
    for one in summaries
    if one.done and one is not best
  ]
  return Pairs(best, found) if any(one.seeds for one in found) else None


def title(found: Pairs) -> str:
  """The title of the table."""
  return f"BLEU, paired over sentences: each row against {found.best.label}"


def legend(found: Pairs) -> str:
  """What is paired, what is drawn, and what the interval above is instead."""
  split = found.best.done[0]["final"].get("split", "")
  told = (
    f"`{found.best.label}` has the best mean BLEU. The difference is the mean BLEU "
    "of a row less that of the best, over the seeds that both have. Its 95 % "
    "interval and p are those of the paired bootstrap (Koehn 2004; p as SacreBLEU "
    "defines it): "
    f"the sentences of the {split} split are drawn with replacement "
    f"{bootstrap.RESAMPLES:,} times, the same draw for both rows and for all "
    "seeds. They tell what other sentences would change for these very models. "
    "The interval over seeds in the table above is another thing: it tells what "
    "other seeds would change on these very sentences."
  )
  if any(one.difference is None for one in found.pairs):
    told += (
      " A dash is where two rows have no seed in common, or other sentences."
    )
  return told


def table(found: Pairs) -> Table:
  """The comparison as text."""
  across = words.across_leaves([one.row for one in found.pairs])
  header = ["attention", *map(words.short, across), *HEADS]
  rows = []
  for row, seeds, difference in found.pairs:
    cells = [row.attention, *(str(row.across.get(x, "–")) for x in across)]
    rows.append([*cells, str(seeds), *shown(difference)])
  return Table(header, rows, 1 + len(across))


def shown(difference: Difference | None) -> list[str]:
  """A difference, its interval and its p-value; dashes where there is none."""
  if difference is None:
    return ["–"] * 3
  mean, low, high = (f"{x:+.2f}".replace("-", "−") for x in difference[:3])
  return [mean, f"[{low}, {high}]", f"{difference.p_value:.3f}"]


def _pair(
  row: Summary,
  theirs: Mapping[int, np.ndarray],
  drawn: np.ndarray,
  effective_order: bool,
) -> Pair:
  ours = _statistics(row)
  seeds = sorted(ours.keys() & theirs.keys())
  systems = [of[seed] for of in (ours, theirs) for seed in seeds]
  if not seeds or not bootstrap.are_paired([*theirs.values(), *systems]):
    return Pair(row, 0, None)
  difference = bootstrap.paired(
    np.stack(systems[: len(seeds)]),
    np.stack(systems[len(seeds) :]),
    drawn,
    effective_order,
  )
  return Pair(row, len(seeds), difference)


def _statistics(row: Summary) -> dict[int, np.ndarray]:
  """Seed -> statistics of the sentences [N, 10], of the runs that have them."""
  return {
    run["seed"]: np.asarray(run["sentences"], np.float64)
    for run in row.done
    if "sentences" in run
  }


def _has_effective_order(run: Record) -> bool:
  """Whether its BLEU is of the longest n-grams there are, as its signature says."""
  return "eff:yes" in run["final"].get("bleu_signature", "")
