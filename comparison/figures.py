"""Figures of what a comparison found: seeds, curves, lengths, costs, capacity, scaling.

Each function takes the tables of `frame` and `summary` for one task and returns a
figure of matplotlib, or None where there is nothing to draw.
"""

from collections.abc import Mapping, Sequence
import itertools
import math
import re
from typing import Any, NamedTuple

import pandas as pd

from comparison import frame
from comparison import summary as summary_lib
from comparison.style import MUTED, Style

_FEW = 8  # Lines that one panel can hold.
_LENGTH = re.compile(r"length_(\d+)")
_TRAINED = (
  "test",
  "validation",
)  # Splits of the trained length, in this order.
_AGAINST = ("forward_flops", "step_seconds", "cache_bytes")
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


def seeds(
  summary: pd.DataFrame, runs: pd.DataFrame, styles: Mapping[str, Style]
) -> Any | None:
  """Every seed as a dot, a row a mechanism, the best on top.

  Args:
    summary: of a task, as `summary.summarize` has it.
    runs: of `frame.runs`.
    styles: mechanism -> how it is drawn.
  """
  shown = summary[summary["seeds"] > 0]
  if shown.empty:
    return None
  first = shown.iloc[0]
  figure = _figure((6.8, 1.1 + 0.21 * len(shown)))
  axes = figure.subplots()
  for place, (_, row) in enumerate(shown.iterrows()):
    style = styles[row["attention"]]
    values = summary_lib.seed_values(runs, row, row["metric"])
    if not summary_lib.is_counted(summary) and not math.isnan(row["low"]):
      axes.hlines(place, row["low"], row["high"], color=MUTED, linewidth=0.8)
    axes.plot(
      values, [place] * len(values), color=style.color, marker=style.marker,
      linestyle="", alpha=0.75, clip_on=False,
    )  # fmt: skip
  if summary_lib.is_counted(summary):
    axes.axvline(first["solved_at"], color=MUTED, linestyle=":")
  axes.set_yticks(range(len(shown)), list(shown["row"]))
  axes.set_ylim(len(shown) - 0.5, -0.5)
  upper = frame.upper_bound(first["metric"])
  if math.isfinite(upper) and first["best"] > upper / 2:
    axes.set_xlim(0, upper)
  axes.set_xlabel(
    f"{first['metric']} on the {first['split']} split, a dot a seed"
  )
  figure.suptitle(first["task"])
  return figure


def learning_curves(
  summary: pd.DataFrame,
  runs: pd.DataFrame,
  curves: pd.DataFrame,
  styles: Mapping[str, Style],
  metric: str | None = None,
) -> Any | None:
  """The metric of a task by step, a line a seed.

  Args:
    summary: of a task.
    runs: of `frame.runs`.
    curves: of `frame.curves`.
    styles: mechanism -> how it is drawn.
    metric: of the first held-out split; by default the one that decides where it
      was evaluated four times or more, else the loss on training data.
  """
  shown = summary[summary["seeds"] > 0]
  if shown.empty:
    return None
  task, split = shown.iloc[0]["task"], _choosing_split(runs, shown.iloc[0])
  of_task = curves[curves["task"] == task]
  if metric is None:
    metric = shown.iloc[0]["metric"]
    known = of_task[(of_task["split"] == split) & (of_task["metric"] == metric)]
    if known["step"].nunique() < 4:
      metric, split = "loss", "train"
  kept = of_task[(of_task["split"] == split) & (of_task["metric"] == metric)]
  names = {
    (row["row"], seed, row["grid"]): row["attention"]
    for _, row in shown.iterrows()
    for seed in summary_lib.seed_values(runs, row, row["metric"]).index
  }
  drawn = []
  for (name, seed, grid), one in kept.groupby(
    ["row", "seed", "grid"], sort=False
  ):
    if attention := names.get((name, seed, grid)):
      drawn.append(Line(name, attention, list(one["step"]), list(one["value"])))
  order = {name: place for place, name in enumerate(shown["row"])}
  drawn.sort(key=lambda line: order[line.name])
  return lines(
    drawn, styles, f"{task}: {metric}, {split} split", "step", metric or ""
  )


def lengths(
  summary: pd.DataFrame,
  runs: pd.DataFrame,
  curves: pd.DataFrame,
  styles: Mapping[str, Style],
) -> Any | None:
  """Quality at other lengths than the trained one, a line a seed.

  Args:
    summary: of a task.
    runs: of `frame.runs`.
    curves: of `frame.curves`.
    styles: mechanism -> how it is drawn.
  """
  table = at_lengths(summary, runs, curves)
  if table.empty:
    return None
  drawn = [
    Line(
      str(name), of["attention"].iloc[0], list(of["ratio"]), list(of["value"])
    )
    for (name, _), of in table.groupby(["row", "seed"], sort=False)
  ]
  first = summary.iloc[0]
  title = f"{first['task']}: other lengths than the trained one (×1)"
  return lines(
    drawn, styles, title, "length / trained length", first["metric"], x_log=True
  )


def at_lengths(
  summary: pd.DataFrame, runs: pd.DataFrame, curves: pd.DataFrame
) -> pd.DataFrame:
  """The deciding metric of each seed at each length, at the end of training.

  Returns:
    Columns `row`, `attention`, `seed`, `length`, `ratio` to the trained length,
    `value`; empty for a task of one length.
  """
  first = summary.iloc[0]
  kept = curves[
    (curves["task"] == first["task"]) & (curves["metric"] == first["metric"])
  ]
  splits = set(_TRAINED) | {s for s in kept["split"] if _LENGTH.fullmatch(s)}
  kept = kept[kept["split"].isin(splits)]
  last = kept.groupby(["run", "split"])["value"].last().unstack()
  content = []
  for _, row in summary[summary["seeds"] > 0].iterrows():
    shown: Any = summary_lib.shown_runs(runs, row)
    for one in shown[shown["length"].notna()].itertuples():
      if one.run not in last.index:
        continue
      values = last.loc[one.run].dropna()
      here = {
        int(match[1]): value
        for split, value in values.items()
        if (match := _LENGTH.fullmatch(str(split)))
      }
      trained = next((values[s] for s in _TRAINED if s in values), None)
      if not here or trained is None:
        continue
      here[int(one.length)] = trained
      content += [
        {
          **{"row": row["row"], "attention": row["attention"]},
          **{"seed": one.seed, "length": n, "ratio": n / one.length},
          "value": here[n],
        }
        for n in sorted(here)
      ]
  columns = ["row", "attention", "seed", "length", "ratio", "value"]
  return pd.DataFrame(content, columns=columns)


def quality_cost(
  summary: pd.DataFrame, runs: pd.DataFrame, styles: Mapping[str, Style]
) -> Any | None:
  """The metric of every seed against what an update and a sequence cost.

  Costs begin at 0, so that a few per cent look like a few per cent.

  Args:
    summary: of a task.
    runs: of `frame.runs`.
    styles: mechanism -> how it is drawn.
  """
  shown = summary[summary["seeds"] > 0]
  against = [name for name in _AGAINST if shown[name].nunique() > 1]
  if shown.empty or not against:
    return None
  mechanisms = list(dict.fromkeys(shown["attention"]))
  height = 3.2 + 0.16 * math.ceil(len(mechanisms) / 4)
  figure = _figure((3.4 * len(against), height))
  panels = figure.subplots(1, len(against), squeeze=False, sharey=True)[0]
  for name, axes in zip(against, panels, strict=True):
    cost = summary_lib.COSTS[name]
    for _, row in shown[shown[name].notna()].iterrows():
      values = summary_lib.seed_values(runs, row, row["metric"])
      style = styles[row["attention"]]
      axes.plot(
        [row[name] * cost.scale] * len(values), values, color=style.color,
        marker=style.marker, linestyle="", alpha=0.75,
      )  # fmt: skip
    places = shown[name].dropna() * cost.scale
    _cost_axis(axes, places)
    axes.set_xlabel(f"{cost.title}, {cost.unit}")
  panels[0].set_ylabel(shown.iloc[0]["metric"])
  legend(figure, mechanisms, styles)
  figure.suptitle(shown.iloc[0]["task"])
  return figure


def capacity(
  summary: pd.DataFrame, runs: pd.DataFrame, styles: Mapping[str, Style]
) -> Any | None:
  """Quality against the memory of a sequence: Figure 2 of Zoology.

  A line joins the rows of one mechanism that differ in numbers, such as the width
  of the model; rows that differ in anything else have lines of their own.

  Args:
    summary: of a task.
    runs: of `frame.runs`.
    styles: mechanism -> how it is drawn.
  """
  shown = summary[(summary["seeds"] > 0) & summary["cache_bytes"].notna()]
  if shown.empty:
    return None
  drawn = []
  twins = shown["width"].eq("dense").map({True: frame.TWIN, False: ""})
  keys = [shown["attention"], shown["across"].map(_without_numbers), twins]
  for (attention, kind, twin), of in shown.groupby(keys, sort=False):
    of = of.sort_values("cache_bytes")
    if of["cache_bytes"].nunique() < 2:
      continue
    name = ", ".join(filter(None, map(str, (attention, kind, twin))))
    kib = [size / 2**10 for size in of["cache_bytes"]]
    drawn.append(Line(name, str(attention), kib, list(of["mean"])))
  first = shown.iloc[0]
  return lines(
    drawn,
    styles,
    f"{first['task']}: quality against memory, means over seeds",
    "cache and state of a sequence, KiB",
    first["metric"],
    x_log=True,
  )


def scaling(
  rows: Sequence[Mapping[str, Any]], styles: Mapping[str, Style], causal: bool
) -> dict[str, Any]:
  """Time and memory of the attention alone against length.

  Args:
    rows: of `benchmarks.scaling`.
    styles: mechanism -> how it is drawn.
    causal: which rows.

  Returns:
    Name of a file -> figure.
  """
  kind = "causal" if causal else "full"
  table = pd.DataFrame([row for row in rows if row["causal"] == causal])
  found: dict[str, Any] = {}
  if table.empty:
    return found
  for part, of_part in table.groupby("part", sort=False):
    for column, label in (
      ("seconds", "time, s"),
      ("temp_bytes", "temporary memory, B"),
    ):
      kept = of_part[of_part[column].fillna(0) > 0].sort_values("length")
      drawn = [
        Line(
          str(name).removesuffix(".dot_product_attention"),
          str(name),
          list(of["length"]),
          list(of[column]),
        )
        for name, of in kept.groupby("mechanism", sort=False)
      ]
      title = f"{part}, {kind} attention"
      figure = lines(
        drawn, styles, title, "length, tokens", label, x_log=True, y_log=True
      )
      if figure is not None:
        found[f"scaling-{kind}-{part}-{column}"] = figure
  return found


def lines(
  drawn: Sequence[Line],
  styles: Mapping[str, Style],
  title: str,
  x_label: str,
  y_label: str,
  *,
  x_log: bool = False,
  y_log: bool = False,
) -> Any | None:
  """Lines with their names at their ends, or a panel each where they are many.

  More than eight names are small multiples, a panel a mechanism, with the mean of
  every name in grey behind it; rows of one mechanism are fainter one by one.

  Args:
    drawn: the lines; those of one name belong together, as seeds do.
    styles: mechanism -> how it is drawn.
    title: of the figure.
    x_label: of the axis, with its unit.
    y_label: likewise.
    x_log: a logarithmic axis with ticks at the places of the lines.
    y_log: a logarithmic axis.

  Returns:
    The figure; None without lines.
  """
  if not drawn:
    return None
  names = list(dict.fromkeys(line.name for line in drawn))
  if len(names) <= _FEW:
    figure = _figure((6.8, 3.6))
    panels, groups = [figure.subplots()], {"": list(drawn)}
  else:
    groups = {}
    several = len({line.attention for line in drawn}) > 1
    for line in drawn:
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
  means = [_mean(drawn, name) for name in names]
  for axes, (key, of_panel) in zip(panels, groups.items(), strict=False):
    if key:
      axes.set_title(shortened(key))
      for line in means:
        axes.plot(line.x, line.y, color="#dcdcdc", linewidth=0.6, zorder=1)
    # Rows of one mechanism have its colour, and are told apart by its strength.
    of_names = sorted({line.name for line in of_panel}) if key else names
    for place, name in enumerate(of_names):
      for line in (line for line in of_panel if line.name == name):
        style = styles[line.attention]
        axes.plot(
          line.x, line.y, color=style.color, linestyle=style.linestyle,
          marker=style.marker, markevery=[len(line.x) - 1],
          linewidth=1.0 if key else 1.2, label=name.removeprefix(f"{key}, "),
          alpha=1 - 0.7 * place / len(of_names) if key else 1.0,
        )  # fmt: skip
    if key and len(of_names) > 1:
      handles, labels = axes.get_legend_handles_labels()
      one_a_row = dict(zip(labels, handles, strict=True))
      axes.legend(one_a_row.values(), one_a_row, fontsize=5)
    if x_log:
      _at_places(axes, [x for line in drawn for x in line.x])
    if y_log:
      axes.set_yscale("log")
      # The default labels are formulas, which `style.look` does not typeset.
      axes.yaxis.set_major_formatter("{x:g}")
  if len(names) <= _FEW:
    _name_ends(panels[0], drawn, styles)
    panels[0].set(xlabel=x_label, ylabel=y_label)
  else:
    figure.supxlabel(x_label, fontsize=8.5)
    figure.supylabel(y_label, fontsize=8.5)
  figure.suptitle(title)
  return figure


def _figure(size: tuple[float, float]) -> Any:
  # Without pyplot, which would keep every figure and ask for a display.
  from matplotlib.figure import Figure

  return Figure(figsize=size, layout="constrained")


def _name_ends(
  axes: Any, drawn: Sequence[Line], styles: Mapping[str, Style]
) -> None:
  """Writes each name, with its marker, to the right of where its lines end."""
  ends: dict[str, list[Line]] = {}
  for line in drawn:
    ends.setdefault(line.name, []).append(line)
  low, high = axes.get_ylim()
  is_log = axes.get_yscale() == "log"

  def place(value: float) -> float:
    if is_log:
      return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)

  heights = {
    name: sum(place(line.y[-1]) for line in of) / len(of)
    for name, of in ends.items()
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
  for name, of in ends.items():
    style = styles[of[0].attention]
    axes.plot(
      1.03, heights[name], color=style.color, marker=style.marker,
      transform=axes.transAxes, clip_on=False,
    )  # fmt: skip
    axes.text(
      1.05, heights[name], name, color=style.color, va="center", fontsize=8,
      transform=axes.transAxes,
    )  # fmt: skip


def legend(
  figure: Any, mechanisms: Sequence[str], styles: Mapping[str, Style]
) -> None:
  """Adds colours, markers and names of mechanisms below all panels."""
  from matplotlib.lines import Line2D

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
    _at_places(axes, list(values))
  else:
    axes.set_xlim(0, 1.08 * values.max())


def _at_places(axes: Any, places: Sequence[float]) -> None:
  """A logarithmic x with ticks at the places, or at powers of two near them."""
  from matplotlib import ticker

  axes.set_xscale("log", base=2)
  ticks = sorted(set(places))
  logs = [math.log2(tick) for tick in ticks]
  apart = (logs[-1] - logs[0]) / 6  # At least, or labels would overlap.
  if any(after - before < apart for before, after in itertools.pairwise(logs)):
    low, high = math.ceil(logs[0]), math.floor(logs[-1])
    stride = math.ceil((high - low + 1) / 6) or 1
    powers = [2.0**power for power in range(low, high + 1, stride)]
    ticks = powers or [ticks[0], ticks[-1]]
  axes.set_xticks(ticks, [f"{tick:,.4g}" for tick in ticks])
  axes.xaxis.set_minor_locator(ticker.NullLocator())


def _mean(drawn: Sequence[Line], name: str) -> Line:
  """The mean of the lines of a name, at the places that all of them have."""
  of = [
    dict(zip(line.x, line.y, strict=True))
    for line in drawn
    if line.name == name
  ]
  places = [x for x in of[0] if all(x in one for one in of)]
  values = [sum(one[x] for one in of) / len(of) for x in places]
  attention = next(line.attention for line in drawn if line.name == name)
  return Line(name, attention, places, values)


def _choosing_split(runs: pd.DataFrame, row: Any) -> str:
  return str(summary_lib.shown_runs(runs, row)["choosing_split"].iloc[0])


def _without_numbers(across: str) -> str:
  """The parts of a point of `across` whose values are no numbers."""
  parts = [part for part in across.split(", ") if part]
  return ", ".join(p for p in parts if not _is_number(p.partition("=")[2]))


def _is_number(text: str) -> bool:
  try:
    float(text)
  except ValueError:
    return False
  return True


def shortened(name: str) -> str:
  """Of an import path, the module and the name."""
  path, colon, attribute = name.partition(":")
  return path.rpartition(".")[2] + colon + attribute if colon else name
