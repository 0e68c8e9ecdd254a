"""Figures of a comparison: seeds, learning curves, and quality against cost or size.

Each function of a `Task` returns a figure of matplotlib, or None if there is nothing
to draw. `styles` maps mechanisms to their style.
"""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from matplotlib.lines import Line2D
import pandas as pd

from comparison import criterion
from comparison.analysis import frame
from comparison.analysis.statistics import survival_curve
from comparison.analysis.summary import COSTS, common, has_solved_seeds
from comparison.analysis.task import Task
from comparison.planned_run import COUNTERPART
from comparison.report.lines import (
  Line,
  Styles,
  line_figure,
  logarithmic_ticks,
  new_figure,
  shorten,
)
from comparison.report.style import MUTED, Style, make_row_styles
from settings.typed import literal

_COST_NAMES = ("forward_flops", "step_seconds", "cache_bytes")
_WIDE = 20.0
"""Ratio of largest to smallest value above which an axis is logarithmic."""


def seeds(task: Task, styles: Styles) -> Any | None:
  """Every seed as a dot, one row per mechanism, the best at the top."""
  rows = task.finished_rows
  if rows.empty:
    return None
  first, has_solved = rows.iloc[0], has_solved_seeds(rows)
  figure = new_figure((6.8, 1.1 + 0.21 * len(rows)))
  axes = figure.subplots()
  row_styles = _row_styles(rows, styles)
  for y, (_, row) in enumerate(rows.iterrows()):
    style = row_styles[row["name"]]
    values = task.seed_values(row)
    if not has_solved and not math.isnan(row["low"]):
      axes.hlines(y, row["low"], row["high"], color=MUTED, linewidth=0.8)
    axes.plot(
      values, [y] * len(values), color=style.color, marker=style.marker,
      linestyle="", alpha=0.75, clip_on=False,
    )  # fmt: skip
  if has_solved:
    axes.axvline(first["solved_at"], color=MUTED, linestyle=":")
  axes.set_yticks(range(len(rows)), list(rows["name"]))
  axes.set_ylim(len(rows) - 0.5, -0.5)
  upper = criterion.upper_bound(first["metric"])
  if math.isfinite(upper):  # Default margins would extend below 0.
    axes.set_xlim(0, upper if first["best"] > upper / 2 else None)
  axes.set_xlabel(
    f"{first['metric']} on the {first['split']} split, one dot per seed"
  )
  figure.suptitle(first["task"])
  return figure


def learning_curves(
  task: Task, styles: Styles, metric: str | None = None
) -> Any | None:
  """The metric of a task by step, one line per seed.

  Args:
    task: the task, with its curves.
    styles: styles of its mechanisms.
    metric: a metric of the first held-out split; None is the main metric if it was
      evaluated at least four times, else the training loss.
  """
  rows = task.finished_rows
  if rows.empty:
    return None
  split = str(task.runs_of(rows.iloc[0])["choosing_split"].iloc[0])
  quantity = metric or task.metric
  curves = task.points(split, quantity)
  if metric is None and curves["step"].nunique() < 4:
    quantity, split = "loss", "train"
    curves = task.points(split, quantity)
  series = []
  for _, row in rows.iterrows():
    runs = task.runs_of(row).dropna(subset=[task.metric])["run"]
    points = curves[curves["run"].isin(runs)]
    series += [
      Line(row["name"], row["attention"], list(run["step"]), list(run["value"]))
      for _, run in points.groupby("run", sort=False)
    ]
  title = f"{task.name}: {quantity}, {split} split"
  return line_figure(series, styles, title, "step", quantity)


def survival(task: Task, styles: Styles) -> Any | None:
  """The share of seeds that have solved the task, by step, on a logarithmic axis."""
  if not task.has_steps_to_solve:
    return None
  rows, series = task.finished_rows.set_index("row"), []
  start = task.steps["steps"].min() / 2
  for row, group in task.steps.groupby("row", sort=False):
    at, share = survival_curve(
      group["steps"].to_numpy(float), group["solved"].to_numpy()
    )
    x = [start, *(step for step in at for _ in range(2))]
    y = [0.0, 0.0, *(1 - z for z in share for _ in range(2))][: len(x)]
    name, mechanism = rows["name"][row], rows["attention"][row]
    series.append(Line(name, mechanism, x, y))
  title = f"{task.name}: seeds that have solved the task"
  return line_figure(
    series, styles, title, "step", "share of seeds", x_log=True
  )


def lengths(task: Task, styles: Styles) -> Any | None:
  """Quality at lengths other than the trained one, one line per seed."""
  table = task.values_by_length
  names = dict(zip(task.summary["row"], task.summary["name"], strict=True))
  series = [
    Line(
      names[name],
      points["attention"].iloc[0],
      list(points["ratio"]),
      list(points["value"]),
    )
    for (name, _), points in table.groupby(["row", "seed"], sort=False)
  ]
  title = f"{task.name}: lengths other than the trained one (×1)"
  return line_figure(
    series, styles, title, "length / trained length", task.metric, x_log=True
  )


def quality_cost(task: Task, styles: Styles) -> Any | None:
  """The metric of every seed against the cost of an update and of a sequence.

  A cost axis starts at 0, or is logarithmic if the costs differ much.
  """
  rows = task.finished_rows
  names = [name for name in _COST_NAMES if rows[name].nunique() > 1]
  if rows.empty or not names:
    return None
  row_styles = _row_styles(rows, styles)
  names_shown = list(row_styles)
  columns = 4 if max(map(len, names_shown)) < 20 else 2
  height = 3.2 + 0.16 * math.ceil(len(names_shown) / columns)
  figure = new_figure((3.4 * len(names), height))
  panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
  for name, axes in zip(names, panels, strict=True):
    cost = COSTS[name]
    for _, row in rows[rows[name].notna()].iterrows():
      values = task.seed_values(row)
      style = row_styles[row["name"]]
      axes.plot(
        [row[name] * cost.scale] * len(values), values, color=style.color,
        marker=style.marker, linestyle="", alpha=0.75,
      )  # fmt: skip
    _cost_axis(axes, rows[name].dropna() * cost.scale)
    axes.set_xlabel(f"{cost.title}, {cost.unit}")
  panels[0].set_ylabel(task.metric)
  legend(figure, names_shown, row_styles, columns)
  figure.suptitle(task.name)
  return figure


def capacity(task: Task, styles: Styles) -> Any | None:
  """Quality against the memory per sequence, as in figure 2 of Zoology.

  A line joins the rows of a mechanism that differ only in numbers, such as the width
  of the model. Rows that differ in other values are on separate lines.
  """
  rows = task.finished_rows[task.finished_rows["cache_bytes"].notna()]
  series = []
  counterparts = rows["width"].eq("dense").map({True: COUNTERPART, False: ""})
  shared = common(task.summary)
  kinds = [_labels(across, shared) for across in rows["across"]]
  keys = [
    rows["attention"],
    pd.Series(kinds, rows.index, dtype=str),
    counterparts,
  ]
  for (attention, kind, counterpart), group in rows.groupby(keys, sort=False):
    group = group.sort_values("cache_bytes")
    if group["cache_bytes"].nunique() < 2:
      continue
    name = ", ".join(filter(None, map(str, (attention, kind, counterpart))))
    kib = [size / 2**10 for size in group["cache_bytes"]]
    series.append(Line(name, str(attention), kib, list(group["mean"])))
  title = f"{task.name}: quality against memory, means over seeds"
  label = "cache and state per sequence, KiB"
  return line_figure(series, styles, title, label, task.metric, x_log=True)


def pairs(task: Task, styles: Styles) -> Any | None:
  """Recall against the number of pairs: means over seeds, and one dot per seed."""
  names = dict(zip(task.summary["row"], task.summary["name"], strict=True))
  series, dots = [], []
  for row, points in task.values_by_pairs.groupby("row", sort=False):
    name, attention = names[row], points["attention"].iloc[0]
    means = points.groupby("pairs")["value"].mean()
    series.append(Line(name, attention, list(means.index), list(means)))
    dots.append(
      Line(name, attention, list(points["pairs"]), list(points["value"]))
    )
  title = f"{task.name}: means over seeds, one dot per seed"
  return line_figure(
    series, styles, title, "pairs", task.metric, dots=dots, x_log=True
  )


def scaling(
  rows: Sequence[Mapping[str, Any]], styles: Styles
) -> dict[str, Any]:
  """Time and memory of the attention functions against length.

  Args:
    rows: rows of `benchmarks.scaling`.
    styles: styles of their mechanisms.

  Returns:
    Maps the names of files to figures.
  """
  labels = {"seconds": "time, s", "temp_bytes": "temporary memory, B"}
  figures: dict[str, Any] = {}
  table = pd.DataFrame(list(rows)).sort_values("causal", kind="stable")
  for (causal, part), group in table.groupby(["causal", "part"], sort=False):
    kind = "causal" if causal else "full"
    for column, label in labels.items():
      points = group[group[column].fillna(0) > 0].sort_values("length")
      series = [
        Line(
          str(name).removesuffix(".dot_product_attention"),
          str(name),
          list(curve["length"]),
          list(curve[column]),
        )
        for name, curve in points.groupby("mechanism", sort=False)
      ]
      title = f"{part}, {kind} attention"
      figure = line_figure(
        series, styles, title, "length, tokens", label, x_log=True, y_log=True
      )
      if figure is not None:
        figures[f"scaling-{kind}-{part}-{column}"] = figure
  return figures


def legend(
  figure: Any, names: Sequence[str], styles: Styles, columns: int = 4
) -> None:
  """Adds colours, markers and names of mechanisms or rows below all panels.

  There are at most `columns` columns, and fewer if long names need the width.
  """
  handles = [
    Line2D([], [], color=styles[name].color, marker=styles[name].marker, ls="")
    for name in names
  ]
  labels = [shorten(name) for name in names]
  for ncols in range(min(columns, len(names)), 0, -1):
    box = figure.legend(
      handles, labels, loc="outside lower center", ncols=ncols
    )
    if ncols == 1 or box.get_window_extent().width <= figure.bbox.width:
      break
    box.remove()


def _row_styles(rows: pd.DataFrame, styles: Styles) -> dict[str, Style]:
  """Maps the names of rows to their styles."""
  return make_row_styles(
    styles, zip(rows["name"], rows["attention"], strict=True)
  )


def _cost_axis(axes: Any, values: pd.Series) -> None:
  """Makes the x axis logarithmic if values differ much, else linear from 0."""
  if values.min() > 0 and values.max() > _WIDE * values.min():
    logarithmic_ticks(axes, list(values))
  else:
    axes.set_xlim(0, 1.08 * values.max())


def _labels(across: str, shared: Sequence[str]) -> str:
  """The non-numeric values of a point of `across`, without the shared ones."""
  values = {x: literal(x.partition("=")[2]) for x in across.split(", ")}
  words = (x for x in values if not frame.is_number(values[x]))
  return ", ".join(x for x in words if x not in shared)
