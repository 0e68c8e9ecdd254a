"""Tables of the report, from the summary of the results."""

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from comparison import criterion
from comparison.analysis import frame, remarks, statistics
from comparison.analysis import summary as summary_lib
from comparison.analysis.sentences import difference, number
from comparison.analysis.summary import COSTS
from comparison.analysis.task import Task
from comparison.measurement.usage import BUSY_CORES
from settings.typed import literal
from training.best import is_lower_better

TIED = "≈"
"""Marks rows that do not differ significantly from the first row or the reference."""

NOTHING = "–"
_WHOLE = "sequence_accuracy"


class Cell(NamedTuple):
  """The text of a cell, and the key by which a table sorts it."""

  text: str
  order: float | str = math.nan


class Table(NamedTuple):
  """A table.

  Attributes:
    header: the title of each column.
    rows: the cells.
    shared: maps the titles of omitted columns to the value that all rows share.
    legend: an explanation of the table; may be empty.
  """

  header: list[str]
  rows: list[list[Cell]]
  shared: Mapping[str, str] = {}
  legend: str = ""

  def frame(self) -> pd.DataFrame:
    """The texts of the cells."""
    texts = [[cell.text for cell in row] for row in self.rows]
    return pd.DataFrame(texts, columns=self.header)


def quality(summary: pd.DataFrame) -> Table:
  """The results of a task's rows, starting with the main metric.

  Args:
    summary: summary of one task.
  """
  rows = [row for _, row in summary.iterrows()]
  columns: dict[str, list[Cell]] = {
    "mechanism": _names(summary),
    _metric_title(summary): [result(row) for row in rows],
    "seeds": [Cell(f"{r['seeds']}/{r['planned']}", r["seeds"]) for r in rows],
  }
  if summary["p"].notna().any():
    against = max(summary["against"])
    kind = (
      "share solved" if summary_lib.has_solved_seeds(summary) else "difference"
    )
    columns[f"{kind}, minus {against}"] = [
      _difference_cell(row, against) for row in rows
    ]
    columns["p"] = [Cell(number(row["p"]), row["p"]) for row in rows]
  decides = summary.iloc[0]["metric"]
  others = [name for name in criterion.HEADLINES if name in summary]
  if (
    summary["solved_at"].notna().any()
  ):  # Models either solve the task or fail.
    others = ["best", _WHOLE, "accuracy"]
    if summary_lib.has_solved_seeds(summary):
      others.insert(0, "mean")
  for name in (*others, "approximation_error"):
    if name != decides and name in summary and summary[name].notna().any():
      title = name.replace("_", " ")
      columns[title] = [Cell(number(x), x) for x in summary[name]]
  points = [
    dict(part.split("=", 1) for part in point.split(", ") if part)
    for point in summary["grid"]
  ]
  for field in sorted({field for point in points for field in point}):
    columns[field.replace("_", " ")] = [
      _grid_cell(point.get(field, NOTHING), field in edge.split(", "))
      for point, edge in zip(points, summary["at_edge"], strict=True)
    ]
  names = ["slots", "options"]
  if all(row["slots"] in ("", row["attention"]) for row in rows):
    names.remove("slots")
  for name in names:
    columns[name] = [Cell(x or NOTHING, x or "") for x in summary[name]]
  columns["parameters"] = [_cost(row, "parameters") for row in rows]
  columns["feed-forward"] = [
    Cell(NOTHING if math.isnan(x) else f"{x:,.0f}", x)
    for x in summary["feed_forward"]
  ]
  legend = remarks.old_metric_note(summary)
  if any(summary["at_edge"]):
    edge = "a value at the edge of its grid; a wider grid may do better."
    legend = f"{legend} (edge): {edge}".strip()
  table = _table(columns, keep=2, legend=legend)
  parts = [part.partition("=") for part in summary_lib.common(summary)]
  shared = {field.replace("_", " "): value for field, _, value in parts}
  return table._replace(shared=shared | dict(table.shared))


def cost(summary: pd.DataFrame) -> Table | None:
  """The costs of a task's rows; None if nothing was measured."""
  ended = summary[summary["seeds"] > 0]
  names = [name for name in COSTS if ended[name].notna().any()]
  if len(names) < 2:
    return None
  columns = {"mechanism": _names(ended)}
  columns[_metric_title(ended)] = [
    result(row, brief=True) for _, row in ended.iterrows()
  ]
  for name in names:
    unit = COSTS[name].unit
    title = f"{COSTS[name].title}, {unit}" if unit else COSTS[name].title
    columns[title] = [_cost(row, name) for _, row in ended.iterrows()]
  legend = ""
  if busy := int(ended["busy"].sum()):
    legend = (
      f"Times of {busy} of {len(ended)} rows are missing or come from only some "
      f"seeds: other programs used more than {BUSY_CORES} cores during the "
      "measurement. `compare.py measure` repeats it."
    )
  return _table(columns, keep=2, legend=legend)


def lengths(task: Task, metric: str | None = None) -> Table | None:
  """Quality at each length: the mean over seeds, the worst and the best seed.

  Args:
    task: the task.
    metric: the metric; None is the main metric.

  Returns:
    The table; None for a task of one length or without the metric.
  """
  metric = metric or task.metric
  table = task.metric_at_lengths(metric)
  if table.empty:
    return None
  rows = task.summary[task.summary["row"].isin(table["row"])]
  limit = float(task.summary["solved_at"].max())
  if not (table["value"] >= limit).any():  # No seed solves any length.
    limit = math.nan
  columns = {"mechanism": _names(rows)}
  worst, best = ("max", "min") if is_lower_better(metric) else ("min", "max")
  for length, points in table.groupby("length"):
    columns[f"at {length}"] = [
      _seed_range(points[points["row"] == name]["value"], limit, worst, best)
      for name in rows["row"]
    ]
  legend = f"{metric}: mean over seeds (worst to best seed)."
  if not math.isnan(limit):
    legend = f"Seeds at {limit:g} or above; {legend}"
  return _table(columns, keep=len(columns), legend=legend)


def whole_sequences(task: Task) -> Table | None:
  """`lengths` of the share of correct sequences; None if it is the main metric."""
  return lengths(task, _WHOLE) if task.metric != _WHOLE else None


def bleu(task: Task) -> Table | None:
  """Compares each row with the best, paired by sentence; None without sentences."""
  if task.metric != "bleu":
    return None
  sentences = {
    row["row"]: _sentences(task, row)
    for _, row in task.finished_rows.iterrows()
  }
  best = task.summary.iloc[0]["row"]
  others = [row for row in sentences if row != best and sentences[row]]
  if not sentences.get(best) or not others:
    return None
  effective = any(
    "eff:yes" in (record.get("final", {}).get("bleu_signature") or "")
    for record in task.records
  )
  differences = [
    _difference(sentences[row], sentences[best], effective) for row in others
  ]
  p_values = [d.p_value if d else math.nan for d in differences]
  columns: dict[str, list[Cell]] = {
    "mechanism": [Cell(row, row) for row in others],
    "BLEU − best": [
      Cell(f"{d.mean:+.2f}", d.mean) if d else Cell(NOTHING)
      for d in differences
    ],
    "95 % interval": [
      Cell(f"{d.low:+.2f} to {d.high:+.2f}", d.low) if d else Cell(NOTHING)
      for d in differences
    ],
    "p, Holm": [Cell(number(p), p) for p in statistics.holm(p_values)],
  }
  legend = (
    f"Against `{best}`. Paired bootstrap over sentences (Koehn 2004), with the same "
    "draws for both rows and all seeds: the uncertainty of these models over other "
    "sentences. The table of quality has the uncertainty over other seeds. The "
    "interval is two-sided; SacreBLEU's p is nearly one-sided, about half of a "
    "two-sided one."
  )
  return Table(list(columns), _rows(columns), {}, legend)


def result(row: Any, brief: bool = False) -> Cell:
  """The metric of a row: '3 of 3' solved seeds, or a mean with its interval."""
  if not row["seeds"]:
    return Cell(row["reason"] or NOTHING)
  mark = f" {TIED}" if row["is_tied"] else ""
  mark = mark if row["is_complete"] else " so far"
  if not math.isnan(row["solved"]):
    solved, seeds = int(row["solved"]), int(row["trials"])
    low, high = statistics.wilson(solved, seeds)
    # For one seed, the interval is meaningless.
    ends = "" if brief or seeds < 2 else f" [{low:.2f}, {high:.2f}]"
    # Thresholds exist only for metrics of which more is better.
    value = solved / seeds + 1e-6 * row["mean"]
    return Cell(f"{solved} of {seeds}{ends}{mark}", value)
  text = number(row["mean"])
  if row["diverged"]:  # The mean over the other seeds would be too optimistic.
    text += f" of {row['seeds']}, {row['diverged']} diverged"
  elif not brief and not math.isnan(row["low"]):
    # Both ends have as many digits as the mean, even near 0.
    form = "{:.3f}".format if 0.01 <= abs(row["mean"]) < 10 else number
    text += f" [{form(row['low'])}, {form(row['high'])}]"
  return Cell(text + mark, row["mean"])


def steps(task: Task) -> Table | None:
  """Steps until seeds solve the task; None if no seed does, or without evaluations."""
  if not task.has_steps_to_solve:
    return None
  points = task.steps
  rows = task.finished_rows[task.finished_rows["row"].isin(points["row"])]
  groups = [points[points["row"] == name] for name in rows["row"]]
  samples = [
    (x["steps"].to_numpy(float), x["solved"].to_numpy()) for x in groups
  ]
  p_values = statistics.log_rank_p_values(*zip(*samples, strict=True))
  medians = [statistics.median_steps(*sample) for sample in samples]
  columns = {
    "mechanism": _names(rows),
    "solved at some step": [
      Cell(f"{x['solved'].sum()} of {len(x)}", x["solved"].mean())
      for x in groups
    ],
    "median steps": [
      Cell(NOTHING if math.isnan(x) else f"{x:,.0f}", x) for x in medians
    ],
    "p": [Cell(number(p), p) for p in p_values],
  }
  legend = (
    "Steps to the first evaluation on the split for choices that solves the task; a "
    "seed that has not solved it is censored at its last step. Median of the "
    "Kaplan-Meier curve; log-rank tests against the first row, Holm's correction over "
    "all pairs of rows."
  )
  return _table(columns, keep=4, legend=legend)


def _difference_cell(row: Any, against: str) -> Cell:
  """The difference of a row from the row `against`; 'too few' without a test."""
  if row["name"] == against or not (row["seeds"] and row["is_complete"]):
    return Cell(NOTHING)
  if math.isnan(row["p"]):
    return Cell("too few")
  if math.isnan(row["difference"]):
    return Cell(NOTHING)
  return Cell(difference(row), row["difference"])


def _names(summary: pd.DataFrame) -> list[Cell]:
  """The names of rows, without the parts that all of them share."""
  return [Cell(name, name) for name in summary["name"]]


def _metric_title(summary: pd.DataFrame) -> str:
  """The title of the column with the main metric."""
  first = summary.iloc[0]
  if summary_lib.has_solved_seeds(summary):
    return f"solved ({first['metric']} ≥ {first['solved_at']:g})"
  return (first["metric"] or "result").replace("_", " ")


def _cost(row: Any, name: str) -> Cell:
  value = row[name] * COSTS[name].scale
  if math.isnan(value):
    return Cell(NOTHING)
  form = ",.0f" if not COSTS[name].unit or abs(value) >= 100 else ".3g"
  return Cell(f"{value:{form}}", value)


def _grid_cell(value: str, at_edge: bool) -> Cell:
  text = f"{value} (edge)" if at_edge else value
  is_number = frame.is_number(literal(value))
  return Cell(text, float(value) if is_number else value)


def _seed_range(values: pd.Series, limit: float, worst: str, best: str) -> Cell:
  """'3 of 8; 0.8 (0.7–0.9)': seeds that reach the limit, mean, and worst to best."""
  if values.empty:
    return Cell(NOTHING)
  low, high = (number(values.agg(end)) for end in (worst, best))
  ends = f" ({low}–{high})" if low != high else ""
  solved = f"{(values >= limit).sum()} of {len(values)}; "
  text = ("" if math.isnan(limit) else solved) + number(values.mean()) + ends
  return Cell(text, values.mean())


def _sentences(task: Task, row: Any) -> dict[int, np.ndarray]:
  """Maps each seed to the statistics of its sentences [N, 10]."""
  names = set(task.runs_of(row)["run"])
  return {
    record["seed"]: np.asarray(record["sentences"], float)
    for record in task.records
    if record.get("sentences") and frame.name(record) in names
  }


def _difference(
  sentences: Mapping[int, np.ndarray],
  others: Mapping[int, np.ndarray],
  effective_order: bool,
) -> statistics.Difference | None:
  """The difference over common seeds; None if the sentences are not the same."""
  seeds = sorted(sentences.keys() & others.keys())
  ours, theirs = (
    [sample[seed] for seed in seeds] for sample in (sentences, others)
  )
  if not seeds or not statistics.are_paired([*ours, *theirs]):
    return None
  return statistics.bleu_difference(
    np.stack(ours), np.stack(theirs), effective_order
  )


def _table(
  columns: Mapping[str, list[Cell]],
  keep: int,
  legend: str = "",
) -> Table:
  """Omits empty columns and columns with one value for all rows, after `keep`."""
  selection: dict[str, list[Cell]] = {}
  shared: dict[str, str] = {}
  for index, (title, cells) in enumerate(columns.items()):
    texts = {cell.text for cell in cells}
    if index < keep or len(texts) > 1:
      selection[title] = cells
    elif texts != {NOTHING}:
      if len(cells) > 1:
        shared[title] = texts.pop()
      else:
        selection[title] = cells
  return Table(list(selection), _rows(selection), shared, legend)


def _rows(columns: Mapping[str, list[Cell]]) -> list[list[Any]]:
  return [list(row) for row in zip(*columns.values(), strict=True)]
