"""Learning curves."""

from collections.abc import Mapping, Sequence
import functools
import statistics
from typing import Any

from comparison.records import Record
from reports import axes as axes_lib
from reports import figures, marks, quality, summary, table, words
from reports import style as style_lib
from reports.figures import Figure
from reports.labels import Finish, Label
from reports.style import Style
from reports.summary import Summary

_MAX_POINTS = 60  # A panel is a few hundred pixels wide.

OPERATIONS = "train_flops"
"""The column with the floating-point operations of a step."""

_AGAINST = {
  "step": "step",
  "seconds": "seconds of training",
  OPERATIONS: "floating-point operations",
}
"""What a curve goes along -> the label of its axis."""

References = Mapping[str, Mapping[str, float]]
"""Results from elsewhere: name -> metric -> value."""


def figure(
  task: str,
  shown: Sequence[Summary],
  styles: Mapping[str, Style],
  references: References,
) -> Figure:
  """Quality and loss of the evaluations, by step, by seconds and by operations.

  Rows at different points of `across` have panels of their own, and then only
  of the quality by step.

  Args:
    task: file in configs/.
    shown: the rows that have something to show.
    styles: label of a mechanism -> how it is drawn.
    references: lines that are drawn where a panel has their metric.
  """
  runs = [run for one in shown for run in one.done]
  lines = [line for run in runs for line in quality.evaluations(run)]
  names = [n for n in map(quality.curve, runs) if n][:1]
  if any(quality.LOSS in line for line in lines):
    names.append(quality.LOSS)
  against = {
    where: label
    for where, label in _AGAINST.items()
    if any(_points(one.done, where, name) for one in shown for name in names)
  }
  points = summary.by_point(shown)
  if len(points) > 1:
    names, against = names[:1], {"step": _AGAINST["step"]}
  columns = len(against) if len(points) < 2 else 2
  panels = {
    words.joined(f"{name} by {label}", point): figures.titled(
      point,
      functools.partial(
        _curve, of_point, styles, where, label, name, references
      ),
    )
    for point, of_point in points.items()
    for name in names
    for where, label in against.items()
  }
  caption = (
    f"{task}: evaluations while it trains. Lines are means over seeds, bands "
    "go from the lowest to the highest seed; seconds and operations leave "
    "compiling and evaluating out."
  )
  if references:
    caption += f" Grey lines are results from elsewhere: {_told(references)}."
  return Figure(f"curves-{words.stem(task)}", caption, panels, columns)


def _curve(
  shown: Sequence[Summary],
  styles: Mapping[str, Style],
  where: str,
  label: str,
  name: str,
  references: References,
  axes: Any,
) -> Finish:
  known = {
    source: values[name]
    for source, values in references.items()
    if name in values
  }
  last, everything, along = [], [*known.values()], []
  for source, value in known.items():
    axes.axhline(
      value, color=style_lib.MUTED, linewidth=0.8, linestyle=(0, (4, 2))
    )
    axes.annotate(
      source,
      (1, value),
      xycoords=("axes fraction", "data"),
      xytext=(-2, 2),
      textcoords="offset points",
      ha="right",
      fontsize=7,
      color=style_lib.MUTED,
    )
  for one in shown:
    points = _points(one.done, where, name)
    if not points:
      continue
    style = styles[one.attention]
    x, mean, low, high = zip(*points, strict=True)
    everything += mean
    along += x
    with marks.of(axes, one.attention):
      axes.plot(x, mean, color=style.color, linestyle=style.dash)
      axes.plot(x[-1], mean[-1], color=style.color, marker=style.marker)
      if low != high:
        axes.fill_between(
          x, low, high, color=style.color, alpha=0.1, linewidth=0
        )
    name_there = words.beside(one.attention)
    label_there = Label(name_there, x[-1], mean[-1], style.color)
    last.append((one.attention, label_there))
  if name == quality.LOSS:
    axes_lib.scale(axes, "y", everything)
  if where == OPERATIONS:
    axes_lib.scale(axes, "x", along, "FLOP")
  axes.set_xlabel(label)
  axes.set_ylabel(name)
  return marks.ends(axes, last)


def _told(references: References) -> str:
  """`nanoGPT loss 1.88`."""
  return ", ".join(
    f"{source} {metric} {value:g}"
    for source, values in references.items()
    for metric, value in values.items()
  )


def _points(
  runs: Sequence[Record], where: str, name: str
) -> list[tuple[float, float, float, float]]:
  """(place, mean, lowest, highest) over seeds, at every step that all have."""
  found: dict[int, list[tuple[float, float]]] = {}
  # Operations of a step follow from the model, so one run's are those of all.
  each = next(filter(None, (table.value(run, where) for run in runs)), None)
  for run in runs:
    for line in quality.evaluations(run):
      value, place = line.get(name), line.get(where)
      if where == OPERATIONS and each is not None:
        place = each * line["step"]
      if quality.is_number(place) and quality.is_number(value):
        found.setdefault(line["step"], []).append((place, value))
  whole = [found[s] for s in sorted(found) if len(found[s]) == len(runs)]
  stride = -(-len(whole) // _MAX_POINTS) or 1
  # The last stays: there the training ended.
  kept = whole[::-1][::stride][::-1]
  points = []
  for pairs in kept:
    places, values = zip(*pairs, strict=True)
    mean = statistics.fmean(values)
    points.append((statistics.fmean(places), mean, min(values), max(values)))
  return points
