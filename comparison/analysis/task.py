"""The results of a comparison on one task, for tables and figures."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import types
from typing import Any

import pandas as pd

from comparison.analysis import frame
from comparison.analysis.summary import summarize
from comparison.records import Record

_LENGTH, _PAIRS = "length_", "pairs_"
_TRAINED = ("test", "validation")
"""Splits with sequences of the trained length; the first one that exists is used."""


@dataclasses.dataclass(frozen=True, eq=False)  # Tables cannot be compared.
class Task:
  """All results of one task.

  Attributes:
    name: name of the task's file in configs/.
    summary: one row per mechanism, best first, from `summary.summarize`.
    runs: rows of `frame.runs`.
    curves: rows of `frame.curves`.
    records: records of the runs.
  """

  name: str
  summary: pd.DataFrame
  runs: pd.DataFrame
  curves: pd.DataFrame
  records: Sequence[Record]

  @property
  def metric(self) -> Any:
    """The main metric; None if no run has finished."""
    return self.summary.iloc[0]["metric"]

  @property
  def finished_rows(self) -> pd.DataFrame:
    """The rows of the summary that have a result."""
    return self.summary[self.summary["seeds"] > 0]

  def runs_of(self, row: Any) -> pd.DataFrame:
    """The finished runs of a row of the summary, at the row's grid point."""
    runs = self.runs
    selection = (runs["row"] == row["row"]) & (runs["grid"] == row["grid"])
    return runs[selection & ~runs["choosing"] & (runs["split"] != "")]

  def seed_values(self, row: Any) -> pd.Series:
    """Maps each seed of a row to its main metric."""
    values = self.runs_of(row).set_index("seed")[self.metric]
    return pd.to_numeric(values, errors="coerce").dropna()

  def points(self, split: str, metric: str) -> pd.DataFrame:
    """The rows of `curves` with a metric on a split."""
    curves = self.curves
    return curves[(curves["split"] == split) & (curves["metric"] == metric)]

  @functools.cached_property
  def values_by_length(self) -> pd.DataFrame:
    """The main metric at each length, as in `metric_at_lengths`."""
    return self.metric_at_lengths(self.metric)

  def metric_at_lengths(self, metric: str) -> pd.DataFrame:
    """A metric of each seed at each length, at the end of training.

    Columns `row`, `attention`, `seed`, `length`, `ratio` to the trained length,
    `value`; empty for a task of one length.
    """
    content = []
    for row, run, values in self._final_values(metric):
      trained = [values[s] for s in _TRAINED if s in values]
      length_values = _values_by_number(values, _LENGTH)
      if length_values and trained and not pd.isna(run.length):
        length_values[int(run.length)] = trained[0]
        content += [
          (row["row"], row["attention"], run.seed, n, n / run.length, value)
          for n, value in sorted(length_values.items())
        ]
    columns = ["row", "attention", "seed", "length", "ratio", "value"]
    return pd.DataFrame(content, columns=columns)

  @functools.cached_property
  def values_by_pairs(self) -> pd.DataFrame:
    """The main metric of each seed at each number of pairs to recall.

    Columns `row`, `attention`, `seed`, `pairs`, `value`; empty for other tasks.
    """
    content = [
      (row["row"], row["attention"], run.seed, n, value)
      for row, run, values in self._final_values(self.metric)
      for n, value in sorted(_values_by_number(values, _PAIRS).items())
    ]
    columns = ["row", "attention", "seed", "pairs", "value"]
    return pd.DataFrame(content, columns=columns)

  @functools.cached_property
  def steps(self) -> pd.DataFrame:
    """The step at which each seed first solves the task on `choosing_split`.

    Columns `row`, `seed`, `steps`, `solved`; a seed that does not solve the task is
    censored at its last step. Empty for a task without a threshold.
    """
    content = []
    for _, row in self.finished_rows[
      self.finished_rows["solved_at"].notna()
    ].iterrows():
      runs: Any = self.runs_of(row)
      for run in runs.itertuples():
        points = self.points(run.choosing_split, self.metric)
        curve = points[points["run"] == run.run]
        solved = curve["step"][curve["value"] >= row["solved_at"]]
        if len(curve):
          step = solved.min() if len(solved) else curve["step"].max()
          content.append((row["row"], run.seed, int(step), bool(len(solved))))
    return pd.DataFrame(content, columns=["row", "seed", "steps", "solved"])

  @property
  def has_steps_to_solve(self) -> bool:
    """Whether a seed solves the task, and `steps` has at least three values."""
    is_solved = bool(self.steps["solved"].any())
    return is_solved and self.steps["steps"].nunique() > 2

  def _final_values(
    self, metric: str
  ) -> Iterator[tuple[pd.Series, Any, dict[str, float]]]:
    """Yields each run's row of the summary, the run, and its last value per split."""
    curves = self.curves[self.curves["metric"] == metric]
    last = curves.groupby(["run", "split"])["value"].last()
    values_by_run = {
      run: dict(values.droplevel("run")) for run, values in last.groupby("run")
    }
    for _, row in self.finished_rows.iterrows():
      runs: Any = self.runs_of(row)
      for run in runs.itertuples():
        yield row, run, values_by_run.get(run.run, {})


def _values_by_number(
  values: Mapping[str, float], prefix: str
) -> dict[int, float]:
  """The values of splits with a prefix, by number: 128 for 'length_128'."""
  numbers = {x: x.removeprefix(prefix) for x in values if x.startswith(prefix)}
  return {int(n): values[x] for x, n in numbers.items() if n.isdecimal()}


def by_task(
  records: Sequence[Record],
  plan: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
  reference: str | None = None,
) -> dict[str, Task]:
  """The results of a comparison by task, with the arguments of `summarize`."""
  runs = frame.runs(records)
  summary = summarize(runs, plan, reference)
  return divide_by_task(records, runs, frame.curves(records), summary)


def divide_by_task(
  records: Sequence[Record],
  runs: pd.DataFrame,
  curves: pd.DataFrame,
  summary: pd.DataFrame,
) -> dict[str, Task]:
  """The tables of a comparison, by task, in the order of the summary."""
  if summary.empty:
    return {}
  return {
    str(name): Task(
      str(name),
      rows,
      runs[runs["task"] == name],
      curves[curves["task"] == name],
      [record for record in records if record["task"] == name],
    )
    for name, rows in summary.groupby("task", sort=False)
  }
