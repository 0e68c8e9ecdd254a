"""Tables for readers, of the tables for programs."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from comparison import figures, frame, statistics
from comparison import summary as summary_lib
from comparison.summary import COSTS, number
from comparison.usage import BUSY_CORES

TIED = "≈"
"""Stands behind rows that cannot be told from the best one."""

NOTHING = "–"


class Cell(NamedTuple):
  """What a reader sees, and what a table sorts by."""

  text: str
  order: float | str = math.nan


class Table(NamedTuple):
  """A table.

  Attributes:
    header: a title for each column.
    rows: of cells.
    shared: title -> what all rows have in a column that is therefore left out.
    legend: what is to be known to read it; may be empty.
  """

  header: list[str]
  rows: list[list[Cell]]
  shared: Mapping[str, str] = {}
  legend: str = ""

  def frame(self) -> pd.DataFrame:
    """Its texts."""
    texts = [[cell.text for cell in row] for row in self.rows]
    return pd.DataFrame(texts, columns=self.header)


def quality(summary: pd.DataFrame) -> Table:
  """What a task's rows reached, the metric that decides first.

  Args:
    summary: of a task.
  """
  columns: dict[str, list[Cell]] = {"mechanism": _names(summary)}
  metric = summary.iloc[0]["metric"]
  columns[_deciding(summary)] = [result(row) for _, row in summary.iterrows()]
  columns["seeds"] = [
    Cell(f"{row['seeds']}/{row['planned']}", row["seeds"])
    for _, row in summary.iterrows()
  ]
  is_counted = summary_lib.is_counted(summary)
  others = [
    name
    for name in frame.HEADLINES
    if name in summary and name != metric and not is_counted
  ]
  for name in (*others, "approximation_error"):
    if summary[name].notna().any():
      title = name.replace("_", " ")
      columns[title] = [Cell(number(x), x) for x in summary[name]]
  grids = [point.split(", ") if point else [] for point in summary["grid"]]
  for leaf in sorted({part.partition("=")[0] for of in grids for part in of}):
    columns[leaf.replace("_", " ")] = [
      _grid_cell(leaf, of, edge)
      for of, edge in zip(grids, summary["at_edge"], strict=True)
    ]
  for name in ("slots", "options"):
    columns[name] = [
      Cell(text or NOTHING, text or "") for text in summary[name]
    ]
  columns["parameters"] = [
    _cost(row, "parameters") for _, row in summary.iterrows()
  ]
  if summary["feed_forward"].notna().any():
    columns["feed-forward"] = [
      Cell(number_of(x, ",.0f"), x) for x in summary["feed_forward"]
    ]
  legend = ""
  if any("(edge)" in cell.text for of in columns.values() for cell in of):
    legend = (
      "(edge): a value at the end of its grid, where a wider one may do better."
    )
  return _table(summary, columns, keep=2, legend=legend)


def cost(summary: pd.DataFrame) -> Table | None:
  """What a task's rows take; None where nothing was measured."""
  ended = summary[summary["seeds"] > 0]
  shown = [name for name in COSTS if ended[name].notna().any()]
  if len(shown) < 2:
    return None
  columns = {"mechanism": _names(ended)}
  columns[_deciding(ended)] = [
    result(row, brief=True) for _, row in ended.iterrows()
  ]
  for name in shown:
    unit = COSTS[name].unit
    title = f"{COSTS[name].title}, {unit}" if unit else COSTS[name].title
    columns[title] = [_cost(row, name) for _, row in ended.iterrows()]
  legend = ""
  if busy := int(ended["busy"].sum()):
    legend = (
      f"Times of {busy} of {len(ended)} rows are left out or are those of some seeds "
      f"alone: other programs used more than {BUSY_CORES} cores while they "
      "were taken. `compare.py measure` takes them again."
    )
  return _table(ended, columns, keep=2, legend=legend)


def lengths(
  summary: pd.DataFrame, runs: pd.DataFrame, curves: pd.DataFrame
) -> Table | None:
  """Quality at each length, the mean of the seeds and the worst to the best."""
  found = figures.at_lengths(summary, runs, curves)
  if found.empty:
    return None
  sizes = sorted(found["length"].unique())
  rows = summary[summary["row"].isin(found["row"])]
  columns = {"mechanism": _names(rows)}
  for size in sizes:
    cells = []
    for name in rows["row"]:
      here = found[(found["row"] == name) & (found["length"] == size)]["value"]
      worst, best = number(here.min()), number(here.max())
      ends = f" ({worst}–{best})" if worst != best else ""
      text = number(here.mean()) + ends
      cells.append(Cell(text, here.mean()) if len(here) else Cell(NOTHING))
    columns[f"at {size}"] = cells
  legend = f"{summary.iloc[0]['metric']}: mean over seeds (worst to best seed)."
  return _table(rows, columns, keep=len(columns), legend=legend)


def bleu(
  summary: pd.DataFrame, runs: pd.DataFrame, records: Sequence[frame.Record]
) -> Table | None:
  """Each row against the best, paired over sentences; None without sentences."""
  if summary.iloc[0]["metric"] != "bleu":
    return None
  of_row = {
    row["row"]: _sentences(row, runs, records)
    for _, row in summary[summary["seeds"] > 0].iterrows()
  }
  best = summary.iloc[0]["row"]
  others = [row for row in of_row if row != best and of_row[row]]
  if not of_row.get(best) or not others:
    return None
  effective = any(
    "eff:yes" in (record.get("final", {}).get("bleu_signature") or "")
    for record in records
  )
  differences = []
  for row in others:
    seeds = sorted(of_row[row].keys() & of_row[best].keys())
    ours, theirs = (
      [of_row[name][seed] for seed in seeds] for name in (row, best)
    )
    differences.append(
      statistics.bleu_difference(np.stack(ours), np.stack(theirs), effective)
      if seeds and statistics.are_paired([*ours, *theirs])
      else None
    )
  known = [d.p_value if d else math.nan for d in differences]
  columns: dict[str, list[Cell]] = {
    "mechanism": [Cell(row, row) for row in others],
    "BLEU − best": [
      _signed(d.mean) if d else Cell(NOTHING) for d in differences
    ],
    "95 % interval": [
      Cell(f"{d.low:+.2f} to {d.high:+.2f}", d.low) if d else Cell(NOTHING)
      for d in differences
    ],
    "p, Holm": [Cell(number(p), p) for p in statistics.holm(known)],
  }
  legend = (
    f"Against `{best}`. The paired bootstrap over sentences (Koehn 2004), the same "
    "draw for both rows and all seeds: what other sentences would change for these "
    "models. The table of quality says what other seeds would change. The interval "
    "is two-sided; SacreBLEU's p is nearly one-sided, about half of a two-sided one."
  )
  return Table(list(columns), _rows(columns), {}, legend)


def result(row: Any, brief: bool = False) -> Cell:
  """The metric of a row: 'solved 3 of 3', or a mean with its interval."""
  if not row["seeds"]:
    return Cell(row["reason"] or NOTHING)
  mark = f" {TIED}" if row["is_tied"] else ""
  if not math.isnan(row["solved"]):
    solved, seeds = int(row["solved"]), int(row["seeds"])
    low, high = statistics.wilson(solved, seeds)
    ends = "" if brief else f" [{low:.2f}, {high:.2f}]"
    worse = (
      -row["mean"] if frame.is_lower_better(row["metric"]) else row["mean"]
    )
    return Cell(
      f"{solved} of {seeds}{ends}{mark}", solved / seeds + 1e-6 * worse
    )
  text = number(row["mean"])
  if not brief and not math.isnan(row["low"]):
    # With the digits of the mean, however near an end is to 0.
    form = "{:.3f}".format if 0.01 <= abs(row["mean"]) < 10 else number
    text += f" [{form(row['low'])}, {form(row['high'])}]"
  return Cell(text + mark, row["mean"])


def number_of(value: float, form: str) -> str:
  """A number in a format; a dash for NaN."""
  return NOTHING if value is None or math.isnan(value) else format(value, form)


def _names(summary: pd.DataFrame) -> list[Cell]:
  """Names of rows, without what all of them have in common."""
  common = _common(summary)
  names = [
    ", ".join(part for part in row.split(", ") if part not in common)
    for row in summary["row"]
  ]
  return [Cell(name, name) for name in names]


def _common(summary: pd.DataFrame) -> list[str]:
  """The values of `across` that all rows have."""
  points = [point.split(", ") for point in summary["across"]]
  first = [part for part in points[0] if part] if len(points) > 1 else []
  return [part for part in first if all(part in point for point in points)]


def _deciding(summary: pd.DataFrame) -> str:
  """Title of the column that decides."""
  first = summary.iloc[0]
  if summary_lib.is_counted(summary):
    return f"solved ({first['metric']} ≥ {first['solved_at']:g})"
  return (first["metric"] or "result").replace("_", " ")


def _cost(row: Any, name: str) -> Cell:
  value = row[name] * COSTS[name].scale
  if math.isnan(value):
    return Cell(NOTHING)
  whole = not COSTS[name].unit or abs(value) >= 100
  return Cell(f"{value:,.0f}" if whole else f"{value:.3g}", value)


def _grid_cell(leaf: str, point: Sequence[str], at_edge: str) -> Cell:
  values = dict(part.split("=", 1) for part in point)
  text = values.get(leaf, NOTHING)
  is_edge = frame.short(leaf) in at_edge.split(", ")
  shown = f"{text} (edge)" if is_edge else text
  try:
    return Cell(shown, float(text))
  except ValueError:
    return Cell(shown, text)


def _signed(value: float) -> Cell:
  return Cell(f"{value:+.2f}", value)


def _sentences(
  row: Any, runs: pd.DataFrame, records: Sequence[frame.Record]
) -> dict[int, np.ndarray]:
  """Seed -> statistics of its sentences [N, 10]."""
  shown = summary_lib.shown_runs(runs, row)
  commands = dict(zip(shown["command"], shown["seed"], strict=True))
  found = {}
  for record in records:
    command = "python train.py " + " ".join(record["arguments"])
    if command in commands and record.get("sentences"):
      found[commands[command]] = np.asarray(record["sentences"], float)
  return found


def _table(
  summary: pd.DataFrame,
  columns: Mapping[str, list[Cell]],
  keep: int,
  legend: str = "",
) -> Table:
  """Leaves out columns behind the first that say nothing or the same of all rows."""
  shown: dict[str, list[Cell]] = {}
  parts = [part.partition("=") for part in _common(summary)]
  shared = {leaf.replace("_", " "): value for leaf, _, value in parts}
  for place, (title, cells) in enumerate(columns.items()):
    texts = {cell.text for cell in cells}
    if place < keep or len(texts) > 1:
      shown[title] = cells
    elif texts == {NOTHING}:
      continue
    elif len(cells) > 1:
      shared[title] = texts.pop()
    else:
      shown[title] = cells
  return Table(list(shown), _rows(shown), shared, legend)


def _rows(columns: Mapping[str, list[Cell]]) -> list[list[Any]]:
  return [list(row) for row in zip(*columns.values(), strict=True)]
