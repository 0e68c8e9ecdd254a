"""Line figures: one panel with names at the ends of lines, or small multiples.

`line_figure` draws the lines that `comparison.report.figures` collects.
"""

from collections.abc import Mapping, Sequence
import itertools
import math
from typing import Any, NamedTuple

from matplotlib import ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from comparison.report.style import Style, make_row_styles

Styles = Mapping[str, Style]

_FEW = 8
"""Largest number of names in one panel."""


class Line(NamedTuple):
  """One line of a figure.

  Attributes:
    name: name of the line, written next to it.
    attention: mechanism, which determines its colour.
    x: increasing positions.
    y: values.
  """

  name: str
  attention: str
  x: Sequence[float]
  y: Sequence[float]


def line_figure(
  series: Sequence[Line],
  styles: Styles,
  title: str,
  x_label: str,
  y_label: str,
  *,
  dots: Sequence[Line] = (),
  x_log: bool = False,
  y_log: bool = False,
) -> Any | None:
  """Draws lines with their names at their ends, or in one panel per mechanism.

  Rows of one mechanism differ in colour, dash and marker. More than eight names become
  small multiples: one panel per mechanism, with the mean of every name in grey in the
  background. There, the rows of a mechanism differ in opacity, which a legend below all
  panels explains.

  Args:
    series: the lines; lines of the same name belong together, such as seeds.
    styles: styles of their mechanisms.
    title: title of the figure.
    x_label: label of the x axis, with its unit.
    y_label: label of the y axis, with its unit.
    dots: points of the mechanisms that no line joins.
    x_log: makes the x axis logarithmic, with ticks at the positions of the lines.
    y_log: makes the y axis logarithmic.

  Returns:
    The figure; None without lines.
  """
  if not series:
    return None
  names = list(dict.fromkeys(line.name for line in series))
  is_one_panel = len(names) <= _FEW
  if is_one_panel:
    figure = new_figure((6.8, 3.6))
    panels, groups = [figure.subplots()], {"": list(series)}
  else:
    groups = {}
    several = len({line.attention for line in series}) > 1
    for line in series:
      key = line.attention if several else line.name
      groups.setdefault(key, []).append(line)
    rows = math.ceil(len(groups) / 4)
    figure = new_figure((9.2, 0.7 + 1.6 * rows))
    grid = figure.subplots(rows, 4, squeeze=False, sharex=True, sharey=True)
    panels = list(grid.flat)
    for axes in panels[len(groups) :]:
      axes.set_visible(False)
    for axes in panels[max(len(groups) - 4, 0) : len(groups)]:
      axes.tick_params(labelbottom=True)
      axes.set_xlabel(x_label)
  means = [_mean(series, name) for name in names]
  row_styles = make_row_styles(
    styles, [(line.name, line.attention) for line in series]
  )
  # Rows of one mechanism share its colour and differ in opacity.
  kinds = list(dict.fromkeys(map(_kind, series)))
  opacities = {x: 1 - 0.7 * n / len(kinds) for n, x in enumerate(sorted(kinds))}
  for axes, (key, group) in zip(panels, groups.items(), strict=False):
    if key:
      axes.set_title(shorten(key))
      for line in means:
        axes.plot(line.x, line.y, color="#dcdcdc", linewidth=0.6, zorder=1)
    for line in group:
      style = row_styles[line.name] if not key else styles[line.attention]
      axes.plot(
        line.x, line.y, color=style.color, linestyle=style.linestyle,
        marker=style.marker, markevery=[len(line.x) - 1],
        linewidth=1.0 if key else 1.2,
        alpha=opacities[_kind(line)] if key else 1.0,
      )  # fmt: skip
    for dot in dots:
      if key in ("", dot.attention, dot.name):
        style = row_styles[dot.name] if not key else styles[dot.attention]
        axes.plot(
          dot.x, dot.y, color=style.color, marker=style.marker, linestyle="",
          markersize=3, alpha=opacities[_kind(dot)] if key else 0.5,
        )  # fmt: skip
    if x_log:
      logarithmic_ticks(axes, [x for line in series for x in line.x])
    if y_log:
      axes.set_yscale("log")
      # The default labels are formulas, which `style.look` does not typeset.
      axes.yaxis.set_major_formatter("{x:g}")
  if is_one_panel:
    _name_ends(panels[0], series, row_styles)
    panels[0].set(xlabel=x_label, ylabel=y_label)
  else:
    figure.supylabel(y_label, fontsize=8.5)
    handles = [
      Line2D([], [], color="black", alpha=alpha, label=kind)
      for kind, alpha in opacities.items()
      if kind
    ]
    if handles and groups.keys() != set(names):
      figure.legend(handles=handles, loc="outside lower center", ncols=3)
  figure.suptitle(title)
  return figure


def _kind(line: Line) -> str:
  """The part of a name that distinguishes rows of a mechanism: 'features=16'."""
  return line.name.removeprefix(line.attention).removeprefix(", ")


def _name_ends(axes: Any, series: Sequence[Line], styles: Styles) -> None:
  """Writes each name, with its marker, to the right of its lines."""
  ends: dict[str, list[Line]] = {}
  for line in series:
    ends.setdefault(line.name, []).append(line)
  low, high = axes.get_ylim()
  is_log = axes.get_yscale() == "log"

  def axis_value(value: float) -> float:
    if is_log:
      return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)

  heights = {
    name: sum(axis_value(line.y[-1]) for line in group) / len(group)
    for name, group in ends.items()
  }
  # From the bottom up, place each name at least a line of text above the previous one.
  gap, height = 0.075, -math.inf
  order = sorted(heights, key=heights.__getitem__)
  for name in order:
    height = heights[name] = max(heights[name], height + gap)
  # Move names that are now above the top down again.
  limit = 1.0
  for name in reversed(order):
    heights[name] = min(heights[name], limit)
    limit = heights[name] - gap
  for name in ends:
    style = styles[name]
    axes.plot(
      1.03, heights[name], color=style.color, marker=style.marker,
      transform=axes.transAxes, clip_on=False,
    )  # fmt: skip
    axes.text(
      1.05, heights[name], name, color=style.color, va="center", fontsize=8,
      transform=axes.transAxes,
    )  # fmt: skip


def new_figure(size: tuple[float, float]) -> Any:
  """An empty figure with a size in inches, whose labels do not overlap."""
  # pyplot would keep every figure in memory, and need a display.
  return Figure(figsize=size, layout="constrained")


def _mean(series: Sequence[Line], name: str) -> Line:
  """The mean of the lines of a name, at their common positions."""
  curves = [
    dict(zip(line.x, line.y, strict=True))
    for line in series
    if line.name == name
  ]
  positions = [x for x in curves[0] if all(x in curve for curve in curves)]
  values = [sum(curve[x] for curve in curves) / len(curves) for x in positions]
  attention = next(line.attention for line in series if line.name == name)
  return Line(name, attention, positions, values)


def logarithmic_ticks(axes: Any, positions: Sequence[float]) -> None:
  """Sets a logarithmic x axis with ticks at the positions, or at powers of two."""
  axes.set_xscale("log", base=2)
  ticks = sorted(set(positions))
  logs = [math.log2(tick) for tick in ticks]
  spacing = (logs[-1] - logs[0]) / 6  # Closer labels would overlap.
  if any(right - left < spacing for left, right in itertools.pairwise(logs)):
    low, high = math.ceil(logs[0]), math.floor(logs[-1])
    stride = math.ceil((high - low + 1) / 4) or 1  # Small panels.
    powers = [2.0**power for power in range(low, high + 1, stride)]
    ticks = powers or [ticks[0], ticks[-1]]
  axes.set_xticks(ticks, [f"{tick:,.4g}" for tick in ticks])
  axes.xaxis.set_minor_locator(ticker.NullLocator())


def shorten(name: str) -> str:
  """Shortens import paths, 'package.mine:plain' to 'mine:plain'; keeps other names."""
  path, colon, attribute = name.partition(":")
  return path.rpartition(".")[2] + colon + attribute if colon else name
