"""Figures of what a comparison found: seeds, curves, lengths, costs, capacity, scaling.

Each function of a `Task` returns a figure of matplotlib, or None where there is
nothing to draw. `styles` says how a mechanism is drawn.
"""

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple

from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
import pandas as pd

from comparison import criterion, frame
from comparison.plan import TWIN
from comparison.style import MUTED, Style
from comparison.summary import COSTS, common, is_counted
from comparison.task import Task
from settings.typed import literal

Styles = Mapping[str, Style]

_FEW = 8  # Lines that one panel can hold.
_COST_NAMES = ("forward_flops", "step_seconds", "cache_bytes")
_WIDE = 20.0  # Times the smallest value, from which an axis is logarithmic.


class Line(NamedTuple):
  """One line of a figure.

  Attributes:
    name: what it is called where it has a name beside it.
    attention: whose colour it has.
    x: places, growing.
    y: values.
  """

  name: str
  attention: str
  x: Sequence[float]
  y: Sequence[float]


def seeds(task: Task, styles: Styles) -> Any | None:
  """Every seed as a dot, a row a mechanism, the best on top."""
  rows = task.ended
  if rows.empty:
    return None
  first, counted = rows.iloc[0], is_counted(rows)
  figure = _figure((6.8, 1.1 + 0.21 * len(rows)))
  axes = figure.subplots()
  for place, (_, row) in enumerate(rows.iterrows()):
    style = styles[row["attention"]]
    values = task.seed_values(row)
    if not counted and not math.isnan(row["low"]):
      axes.hlines(place, row["low"], row["high"], color=MUTED, linewidth=0.8)
    axes.plot(
      values, [place] * len(values), color=style.color, marker=style.marker,
      linestyle="", alpha=0.75, clip_on=False,
    )  # fmt: skip
  if counted:
    axes.axvline(first["solved_at"], color=MUTED, linestyle=":")
  axes.set_yticks(range(len(rows)), list(rows["name"]))
  axes.set_ylim(len(rows) - 0.5, -0.5)
  upper = criterion.upper_bound(first["metric"])
  if math.isfinite(upper) and first["best"] > upper / 2:
    axes.set_xlim(0, upper)
  axes.set_xlabel(
    f"{first['metric']} on the {first['split']} split, a dot a seed"
  )
  figure.suptitle(first["task"])
  return figure


def learning_curves(
  task: Task, styles: Styles, metric: str | None = None
) -> Any | None:
  """The metric of a task by step, a line a seed.

  Args:
    task: with curves.
    styles: of its mechanisms.
    metric: of the first held-out split; by default the one that decides where it
      was evaluated four times or more, else the loss on training data.
  """
  rows = task.ended
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
  return lines(series, styles, title, "step", quantity)


def lengths(task: Task, styles: Styles) -> Any | None:
  """Quality at other lengths than the trained one, a line a seed."""
  table = task.at_lengths
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
  title = f"{task.name}: other lengths than the trained one (×1)"
  return lines(
    series, styles, title, "length / trained length", task.metric, x_log=True
  )


def quality_cost(task: Task, styles: Styles) -> Any | None:
  """The metric of every seed against what an update and a sequence cost.

  Costs begin at 0, so that a few per cent look like a few per cent, or are on a
  logarithmic axis where they differ much.
  """
  rows = task.ended
  names = [name for name in _COST_NAMES if rows[name].nunique() > 1]
  if rows.empty or not names:
    return None
  mechanisms = list(dict.fromkeys(rows["attention"]))
  height = 3.2 + 0.16 * math.ceil(len(mechanisms) / 4)
  figure = _figure((3.4 * len(names), height))
  panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
  for name, axes in zip(names, panels, strict=True):
    cost = COSTS[name]
    for _, row in rows[rows[name].notna()].iterrows():
      values = task.seed_values(row)
      style = styles[row["attention"]]
      axes.plot(
        [row[name] * cost.scale] * len(values), values, color=style.color,
        marker=style.marker, linestyle="", alpha=0.75,
      )  # fmt: skip
    _cost_axis(axes, rows[name].dropna() * cost.scale)
    axes.set_xlabel(f"{cost.title}, {cost.unit}")
  panels[0].set_ylabel(task.metric)
  legend(figure, mechanisms, styles)
  figure.suptitle(task.name)
  return figure


def capacity(task: Task, styles: Styles) -> Any | None:
  """Quality against the memory of a sequence: Figure 2 of Zoology.

  A line joins the rows of one mechanism that differ in numbers, such as the width
  of the model; rows that differ in anything else have lines of their own.
  """
  rows = task.ended[task.ended["cache_bytes"].notna()]
  series = []
  twins = rows["width"].eq("dense").map({True: TWIN, False: ""})
  shared = common(task.summary)
  kinds = [_words(across, shared) for across in rows["across"]]
  keys = [rows["attention"], pd.Series(kinds, rows.index, dtype=str), twins]
  for (attention, kind, twin), group in rows.groupby(keys, sort=False):
    group = group.sort_values("cache_bytes")
    if group["cache_bytes"].nunique() < 2:
      continue
    name = ", ".join(filter(None, map(str, (attention, kind, twin))))
    kib = [size / 2**10 for size in group["cache_bytes"]]
    series.append(Line(name, str(attention), kib, list(group["mean"])))
  title = f"{task.name}: quality against memory, means over seeds"
  label = "cache and state of a sequence, KiB"
  return lines(series, styles, title, label, task.metric, x_log=True)


def scaling(
  rows: Sequence[Mapping[str, Any]], styles: Styles
) -> dict[str, Any]:
  """Time and memory of the attention alone against length.

  Args:
    rows: of `benchmarks.scaling`.
    styles: of their mechanisms.

  Returns:
    Name of a file -> figure.
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
      figure = lines(
        series, styles, title, "length, tokens", label, x_log=True, y_log=True
      )
      if figure is not None:
        figures[f"scaling-{kind}-{part}-{column}"] = figure
  return figures


def lines(
  series: Sequence[Line],
  styles: Styles,
  title: str,
  x_label: str,
  y_label: str,
  *,
  x_log: bool = False,
  y_log: bool = False,
) -> Any | None:
  """Lines with their names at their ends, or a panel each where they are many.

  More than eight names are small multiples, a panel a mechanism, with the mean of
  every name in grey behind it; rows of one mechanism are fainter one by one, as a
  legend below all panels says.

  Args:
    series: the lines; those of one name belong together, as seeds do.
    styles: of their mechanisms.
    title: of the figure.
    x_label: of the axis, with its unit.
    y_label: likewise.
    x_log: a logarithmic axis with ticks at the places of the lines.
    y_log: a logarithmic axis.

  Returns:
    The figure; None without lines.
  """
  if not series:
    return None
  names = list(dict.fromkeys(line.name for line in series))
  if len(names) <= _FEW:
    figure = _figure((6.8, 3.6))
    panels, groups = [figure.subplots()], {"": list(series)}
  else:
    groups = {}
    several = len({line.attention for line in series}) > 1
    for line in series:
      key = line.attention if several else line.name
      groups.setdefault(key, []).append(line)
    rows = math.ceil(len(groups) / 4)
    figure = _figure((9.2, 0.7 + 1.6 * rows))
    grid = figure.subplots(rows, 4, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.flat)
    for axes in panels[len(groups) :]:
      axes.set_visible(False)
    for axes in panels[max(len(groups) - 4, 0) : len(groups)]:
      axes.tick_params(labelbottom=True)
      axes.set_xlabel(x_label)
  means = [_mean(series, name) for name in names]
  # Rows of one mechanism have its colour, and are told apart by its strength.
  kinds = list(dict.fromkeys(map(_kind, series)))
  strengths = {x: 1 - 0.7 * n / len(kinds) for n, x in enumerate(sorted(kinds))}
  for axes, (key, group) in zip(panels, groups.items(), strict=False):
    if key:
      axes.set_title(shortened(key))
      for line in means:
        axes.plot(line.x, line.y, color="#dcdcdc", linewidth=0.6, zorder=1)
    for line in group:
      style = styles[line.attention]
      axes.plot(
        line.x, line.y, color=style.color, linestyle=style.linestyle,
        marker=style.marker, markevery=[len(line.x) - 1],
        linewidth=1.0 if key else 1.2,
        alpha=strengths[_kind(line)] if key else 1.0,
      )  # fmt: skip
    if x_log:
      _logarithmic_ticks(axes, [x for line in series for x in line.x])
    if y_log:
      axes.set_yscale("log")
      # The default labels are formulas, which `style.look` does not typeset.
      axes.yaxis.set_major_formatter("{x:g}")
  if len(names) <= _FEW:
    _name_ends(panels[0], series, styles)
    panels[0].set(xlabel=x_label, ylabel=y_label)
  else:
    figure.supylabel(y_label, fontsize=8.5)
    handles = [
      Line2D([], [], color="black", alpha=alpha, label=kind)
      for kind, alpha in strengths.items()
      if kind
    ]
    if handles and groups.keys() != set(names):
      figure.legend(handles=handles, loc="outside lower center", ncols=3)
  figure.suptitle(title)
  return figure


def _kind(line: Line) -> str:
  """What tells a line from others of its mechanism: 'features=16'."""
  return line.name.removeprefix(line.attention).removeprefix(", ")


def _figure(size: tuple[float, float]) -> Any:
  # Without pyplot, which would keep every figure and ask for a display.
  return Figure(figsize=size, layout="constrained")


def _name_ends(axes: Any, series: Sequence[Line], styles: Styles) -> None:
  """Writes each name, with its marker, to the right of where its lines end."""
  ends: dict[str, list[Line]] = {}
  for line in series:
    ends.setdefault(line.name, []).append(line)
  low, high = axes.get_ylim()
  is_log = axes.get_yscale() == "log"

  def place(value: float) -> float:
    if is_log:
      return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)

  heights = {
    name: sum(place(line.y[-1]) for line in group) / len(group)
    for name, group in ends.items()
  }
  # From the bottom up, each at least a line of text above the one before.
  gap, height = 0.075, -math.inf
  order = sorted(heights, key=heights.__getitem__)
  for name in order:
    height = heights[name] = max(heights[name], height + gap)
  # What went over the top moves down again.
  limit = 1.0
  for name in reversed(order):
    heights[name] = min(heights[name], limit)
    limit = heights[name] - gap
  for name, group in ends.items():
    style = styles[group[0].attention]
    axes.plot(
      1.03, heights[name], color=style.color, marker=style.marker,
      transform=axes.transAxes, clip_on=False,
    )  # fmt: skip
    axes.text(
      1.05, heights[name], name, color=style.color, va="center", fontsize=8,
      transform=axes.transAxes,
    )  # fmt: skip


def legend(figure: Any, mechanisms: Sequence[str], styles: Styles) -> None:
  """Adds colours, markers and names of mechanisms below all panels."""
  handles = [
    Line2D([], [], color=styles[name].color, marker=styles[name].marker, ls="")
    for name in mechanisms
  ]
  figure.legend(
    handles, [shortened(name) for name in mechanisms],
    loc="outside lower center", ncols=min(4, len(mechanisms)),
  )  # fmt: skip


def _cost_axis(axes: Any, values: pd.Series) -> None:
  """A logarithmic x where values differ much, else a linear one from 0."""
  if values.min() > 0 and values.max() > _WIDE * values.min():
    _logarithmic_ticks(axes, list(values))
  else:
    axes.set_xlim(0, 1.08 * values.max())


def _logarithmic_ticks(axes: Any, places: Sequence[float]) -> None:
  """A logarithmic x with ticks at the places, or at powers of two near them."""
  axes.set_xscale("log", base=2)
  ticks = sorted(set(places))
  logs = [math.log2(tick) for tick in ticks]
  spacing = (logs[-1] - logs[0]) / 6  # At least, or labels would overlap.
  if any(right - left < spacing for left, right in itertools.pairwise(logs)):
    low, high = math.ceil(logs[0]), math.floor(logs[-1])
    stride = math.ceil((high - low + 1) / 6) or 1
    powers = [2.0**power for power in range(low, high + 1, stride)]
    ticks = powers or [ticks[0], ticks[-1]]
  axes.set_xticks(ticks, [f"{tick:,.4g}" for tick in ticks])
  axes.xaxis.set_minor_locator(ticker.NullLocator())


def _mean(series: Sequence[Line], name: str) -> Line:
  """The mean of the lines of a name, at the places that all of them have."""
  curves = [
    dict(zip(line.x, line.y, strict=True))
    for line in series
    if line.name == name
  ]
  places = [x for x in curves[0] if all(x in curve for curve in curves)]
  values = [sum(curve[x] for curve in curves) / len(curves) for x in places]
  attention = next(line.attention for line in series if line.name == name)
  return Line(name, attention, places, values)


def _words(across: str, shared: Sequence[str]) -> str:
  """The parts of a point of `across`, but for shared ones, that are no numbers."""
  values = {x: literal(x.partition("=")[2]) for x in across.split(", ")}
  words = (x for x in values if not frame.is_number(values[x]))
  return ", ".join(x for x in words if x not in shared)


def shortened(name: str) -> str:
  """'mine:plain' of the import path 'package.mine:plain'; other names as they are."""
  path, colon, attribute = name.partition(":")
  return path.rpartition(".")[2] + colon + attribute if colon else name
