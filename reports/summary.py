"""A mechanism in a table: its runs over seeds, at one point of the grid.

It has a row for each of the values that a comparison goes across, one where it
goes across none.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
import json
import statistics
from typing import Any

from comparison.records import Record
from reports import numbers, quality, table
from reports.columns import BEST, COSTS, ERROR, LEARNING_RATE, Column

_RATE = "optimizer.learning_rate"

ALONE = 0.25
"""Cores: what other programs may use of a machine that a run has to itself."""

TEXTS = ("slots", "options")
"""Columns of text that say what a row is, behind the label of the mechanism."""


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a mechanism did on a task.

  Attributes:
    task: file in configs/.
    attention: label of the mechanism.
    grid: the point that is shown, leaf -> value; empty without a grid.
    points: how many points it was run with.
    runs: all of them at the point that is shown, by seed.
    across: what makes it a row of its own, leaf -> value; empty where the
      mechanism has one row.
  """

  task: str
  attention: str
  grid: Mapping[str, Any]
  points: int
  runs: Sequence[Record]
  across: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def point(self) -> str:
    """Its `across`, as 'features=16, short_convolution=True'."""
    return told(self.across)

  @property
  def label(self) -> str:
    """What no other row of its task is called."""
    return ", ".join(filter(None, (self.attention, self.point)))

  def told(self, name: str) -> str:
    """One of `TEXTS`; empty where no record says so."""
    return self.runs[0].get(name) or ""

  @property
  def done(self) -> list[Record]:
    """The runs that were trained to their end, measured or not."""
    return [run for run in self.runs if "final" in run]

  def values(self, name: str) -> list[float]:
    """A column of results.csv over the runs that have it."""
    found = (table.value(run, name) for run in self.done)
    return [value for value in found if value is not None]

  def mean(self, name: str) -> float | None:
    """Mean of `values`; None where there are none."""
    found = self.values(name)
    return statistics.fmean(found) if found else None

  def ends(self, name: str) -> tuple[float, float]:
    """The interval of a mean; the mean itself where there is none."""
    values = self.values(name)
    found = numbers.ends(values, quality.highest(name))
    return found or (values[0], values[0])

  def mean_to_choose_by(self, name: str) -> float | None:
    """Mean of a metric on the split that choices are made by."""
    values = (quality.to_choose_by(run, name) for run in self.done)
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None

  @property
  def obstacle(self) -> str:
    """Why there is nothing to show; empty where there is something."""
    if self.done:
      return ""
    return f"{self.runs[0]['status']}: {self.runs[0]['reason']}"


def summarize(found: Sequence[Record]) -> dict[str, list[Summary]]:
  """Task -> a summary of each row, both in the order of the tables."""
  summaries = {}
  for task in sorted({record["task"] for record in found}):
    of_task = [record for record in found if record["task"] == task]
    name = headline(of_task)
    of_row: dict[tuple[str, str], list[Record]] = {}
    for record in sorted(of_task, key=_row_rank):
      point = json.dumps(record.get("across", {}), sort_keys=True)
      of_row.setdefault((record["attention"], point), []).append(record)
    summaries[task] = [_chosen(name, runs) for runs in of_row.values()]
  return summaries


def told(point: Mapping[str, Any]) -> str:
  """Values by the last part of their leaves: 'features=16, position=rotary'."""
  return ", ".join(
    f"{leaf.rpartition('.')[2]}={point[leaf]}" for leaf in sorted(point)
  )


def by_point(
  summaries: Iterable[Summary], without: Collection[str] = ()
) -> dict[str, list[Summary]]:
  """Rows that are drawn together: those at one point of `across`.

  Args:
    summaries: of a task.
    without: leaves of `across` that may differ within a panel.

  Returns:
    The point, as `Summary.point` -> its rows; one empty point without `across`.
  """
  found: dict[str, list[Summary]] = {}
  for one in sorted(summaries, key=lambda one: table.across_rank(one.across)):
    kept = {k: v for k, v in one.across.items() if k not in without}
    found.setdefault(told(kept), []).append(one)
  return {
    point: sorted(rows, key=lambda one: table.rank(one.attention))
    for point, rows in found.items()
  }


def headline(found: Sequence[Record]) -> str | None:
  """The final metric that runs of a task are judged by; None without any."""
  names = (quality.headline(record) for record in found)
  return next((name for name in names if name is not None), None)


def quality_columns(summaries: Sequence[Summary]) -> list[Column]:
  """Final metrics first, as the run names them; those of a part are left out.

  A name that ends in a number ('accuracy_depth_25') is a metric of a part of
  the split: there may be dozens, and results.csv has them.
  """
  done = [run for summary in summaries for run in summary.done]
  name = headline(done)
  names = dict.fromkeys([name] if name else [])
  names |= dict.fromkeys(
    n for run in done for n in quality.metrics(run.get("final", {}))
  )
  split = next((run["final"].get("split") for run in done), "")
  columns = [
    Column(n, n, "", 1, f"at the end, on the {split} split")
    for n in names
    if not n.rpartition("_")[2].isdecimal()
  ]
  columns += _present((BEST, ERROR), summaries)
  is_shown = any(_RATE in {**one.grid, **one.across} for one in summaries)
  return (
    columns if is_shown else columns + _present((LEARNING_RATE,), summaries)
  )


def texts(summaries: Iterable[Summary]) -> list[str]:
  """Which of `TEXTS` have a column: records of old runs have none."""
  shown = list(summaries)
  return [name for name in TEXTS if any(one.told(name) for one in shown)]


def cost_columns(summaries: Sequence[Summary]) -> list[Column]:
  """What it takes; a column that nobody has a value in is left out."""
  return _present(COSTS, summaries)


Marks = Mapping[str, set[str]]
"""Column -> labels of the rows that cannot be told apart from its best."""


def marks(summaries: Sequence[Summary], columns: Sequence[Column]) -> Marks:
  """Those of the metric that runs are judged by, if it is among the columns."""
  name = headline([run for summary in summaries for run in summary.done])
  if name is None or name not in {column.name for column in columns}:
    return {}
  return {name: tied(summaries, name)}


def is_shared(summary: Summary, column: Column) -> bool:
  """Whether other programs used the machine while a run's time was taken."""
  used = summary.values(column.others) if column.others else []
  return max(used, default=0.0) > ALONE


def text(summary: Summary, column: Column, marked: Marks) -> str:
  """Mean and interval of a column, and its marks; a dash where it has no value."""
  values = [v * column.scale for v in summary.values(column.name)]
  highest = quality.highest(column.name) * column.scale
  if not values:
    return "–"
  if column.unit:
    found = numbers.short_interval(values, highest)
    is_marked = is_shared(summary, column)
    return f"{found} {numbers.SHARED}" if is_marked else found
  if column.name.endswith("parameters"):
    return f"{values[0]:,.0f}"
  if column is LEARNING_RATE:
    return numbers.compact(values[0])
  found = numbers.interval(values, highest)
  is_marked = summary.label in marked.get(column.name, ())
  return f"{found} {numbers.TIED}" if is_marked else found


def tied(summaries: Sequence[Summary], name: str) -> set[str]:
  """Rows whose mean cannot be told apart from the best of all, and the best.

  Args:
    summaries: of a task.
    name: of the metric.

  Returns:
    Their labels; none where the best has one seed or stands alone.
  """
  first = best(summaries, name)
  if first is None:
    return set()
  values = first.values(name)
  same = {
    one.label
    for one in summaries
    if one is not first
    and (others := one.values(name))
    and numbers.can_be_told_apart(others, values, quality.highest(name))
    is False
  }
  return same | {first.label} if same else set()


def best(summaries: Sequence[Summary], name: str) -> Summary | None:
  """The row with the best mean of a metric, the first of equals; None without any."""
  found = None
  for one in summaries:
    mean = one.mean(name)
    if mean is None:
      continue
    if found is None or quality.is_better(name, mean, found[1]):
      found = one, mean
  return found[0] if found else None


def _present(
  columns: Sequence[Column], summaries: Sequence[Summary]
) -> list[Column]:
  return [c for c in columns if any(s.values(c.name) for s in summaries)]


def _row_rank(record: Record) -> Any:
  return (
    table.rank(record["attention"]),
    table.across_rank(record.get("across", {})),
  )


def _chosen(name: str | None, runs: Sequence[Record]) -> Summary:
  """Summary at the best point of the grid, by the first held-out split.

  A point where fewer runs failed comes before one with the better mean: the
  mean says nothing about a run that diverged.
  """
  points: dict[str, list[Record]] = {}
  for run in sorted(runs, key=lambda run: run["seed"]):
    key = json.dumps(run.get("grid", {}), sort_keys=True)
    points.setdefault(key, []).append(run)
  summaries = [
    Summary(
      of_point[0]["task"],
      of_point[0]["attention"],
      of_point[0].get("grid", {}),
      len(points),
      of_point,
      of_point[0].get("across", {}),
    )
    for _, of_point in sorted(points.items())
  ]
  chosen = summaries[0]
  for summary in summaries[1:]:
    if _is_preferred(name, summary, chosen):
      chosen = summary
  return chosen


def _is_preferred(name: str | None, summary: Summary, other: Summary) -> bool:
  shares = [len(s.done) / len(s.runs) for s in (summary, other)]
  if shares[0] != shares[1]:
    return shares[0] > shares[1]
  means = [
    s.mean_to_choose_by(name) if name else None for s in (summary, other)
  ]
  if name is None or means[0] is None or means[1] is None:
    return means[0] is not None
  return quality.is_better(name, means[0], means[1])
