"""Quality against what it costs, and what it costs in memory."""

from collections.abc import Mapping, Sequence
import functools
import statistics
from typing import Any

from reports import axes as axes_lib
from reports import (
  capacity,
  curves,
  figures,
  lengths,
  marks,
  quality,
  summary,
  words,
)
from reports import columns as columns_lib
from reports.figures import Figure, Panel
from reports.labels import Finish, Label
from reports.style import Style
from reports.summary import Summary

_MOST_PANELS = 24
"""The most panels of a figure; with more, differences are hard to find."""


def of_task(
  task: str,
  summaries: Sequence[Summary],
  styles: Mapping[str, Style],
  references: curves.References,
) -> list[Figure]:
  """The figures of a task; one that nobody has values for is left out.

  Rows at different points of `across` have panels of their own; a figure that
  would have more of them than anyone reads is left out too.

  Args:
    task: file in configs/.
    summaries: its rows.
    styles: label of a mechanism -> how it is drawn.
    references: results from elsewhere, which curves are shown with.
  """
  shown = [one for one in summaries if one.done]
  drawn = [
    capacity.figure(task, shown, styles),
    lengths.figure(task, shown, styles),
    _quality_cost(task, shown, styles),
    curves.figure(task, shown, styles, references),
    _memory(task, shown, styles),
  ]
  return [one for one in drawn if 0 < len(one.panels) <= _MOST_PANELS]


def _quality_cost(
  task: str, shown: Sequence[Summary], styles: Mapping[str, Style]
) -> Figure:
  name = summary.headline([run for one in shown for run in one.done])
  axes = {
    "forward_flops": ("quality against operations", "forward pass of a batch"),
    "step_seconds": ("quality against time", "training step"),
  }
  units = {"forward_flops": "FLOP", "step_seconds": "s"}
  points = summary.by_point(shown)
  limits = None
  if name and len(points) > 1:
    have = [one for one in shown if one.values(name)]
    limits = axes_lib.limits(
      [end for one in have for end in one.ends(name)],
      quality.highest(name),
    )
  panels = {
    words.joined(title, point): figures.titled(
      point,
      functools.partial(
        _scatter, of_point, styles, cost, label, units[cost], name, limits
      ),
    )
    for point, of_point in points.items()
    for cost, (title, label) in axes.items()
    if name and any(one.values(cost) for one in of_point)
  }
  return Figure(
    f"quality-cost-{words.stem(task)}",
    f"{task}: {name} against what it costs. Bars are 95 % intervals over "
    "seeds, where there are several.",
    panels,
  )


def _scatter(
  shown: Sequence[Summary],
  styles: Mapping[str, Style],
  cost: str,
  label: str,
  unit: str,
  name: str,
  limits: tuple[float, float] | None,
  axes: Any,
) -> Finish:
  points, halves = [], []
  for one in shown:
    x, y = one.mean(cost), one.mean(name)
    if x is None or y is None:
      continue
    style = styles[one.attention]
    low, high = one.ends(name)
    with marks.of(axes, one.attention):
      axes.errorbar(
        x,
        y,
        yerr=[[y - low], [high - y]] if low < high else None,
        color=style.color,
        marker=style.marker,
        markersize=6,
        elinewidth=0.8,
      )
    point = Label(words.beside(one.attention), x, y, style.color)
    points.append((one.attention, point))
    halves.append(max(y - low, high - y))
  axes_lib.scale(axes, "x", [point.x for _, point in points], unit)
  axes.margins(0.16, 0.14)
  if limits:
    axes.set_ylim(*limits)
  axes.set_xlabel(label)
  axes.set_ylabel(name)
  return marks.points(axes, points, halves)


def _memory(
  task: str, shown: Sequence[Summary], styles: Mapping[str, Style]
) -> Figure:
  columns = {column.name: column for column in columns_lib.COSTS}
  titles = {
    "temp_bytes": "memory of a training step",
    "decode_tokens_per_second": "decoding",
  }
  panels: dict[str, Panel] = {}
  for point, of_point in summary.by_point(shown).items():
    for name, title in titles.items():
      have = [one for one in of_point if one.values(name)]
      if have:
        panels[words.joined(title, point)] = figures.titled(
          point, functools.partial(_dots, have, styles, columns[name])
        )
  return Figure(
    f"memory-{words.stem(task)}",
    f"{task}: temporaries of a training step, and how fast it generates; a "
    "mechanism that cannot decode is not there.",
    panels,
  )


def _dots(
  have: Sequence[Summary],
  styles: Mapping[str, Style],
  column: columns_lib.Column,
  axes: Any,
) -> None:
  """A row a mechanism, the best on top is for the reader to find."""
  values = []
  for row, one in enumerate(reversed(have)):
    style = styles[one.attention]
    mean = statistics.fmean(one.values(column.name)) * column.scale
    with marks.of(axes, one.attention):
      axes.plot(mean, row, color=style.color, marker=style.marker, markersize=6)
    values.append(mean)
  axes_lib.scale(axes, "x", values)
  mechanisms = [one.attention for one in reversed(have)]
  axes.set_yticks(range(len(have)), [words.beside(name) for name in mechanisms])
  marks.ticks(axes.yaxis, mechanisms)
  axes.set_ylim(-0.6, len(have) - 0.4)
  axes.margins(x=0.08)
  axes.spines.left.set_visible(False)
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel(words.titled(column))
