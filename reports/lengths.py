"""Quality at other lengths than the trained one, as a table and a figure.

A task that is evaluated at other lengths has a split for each, 'length_128'.
"""

from collections.abc import Mapping, Sequence
import functools
import re
import statistics
from typing import Any

from comparison.records import Record
from reports import axes as axes_lib
from reports import figures, marks, numbers, quality, style, summary, words
from reports.figures import Figure
from reports.labels import Finish, Label
from reports.rows import Table
from reports.style import Style
from reports.summary import Summary

_OTHER = re.compile(r"length_(\d+)")
_TRAINED = ("test", "validation")
"""Splits of the trained length, the one that is shown first."""

_SIZE = (4.4, 3.4)  # Inches: lines cross each other.

AtLengths = dict[int | None, list[float]]
"""Length -> a value a seed; None is the trained one where it is not known."""


def metric(shown: Sequence[Summary]) -> str | None:
  """What is compared at all lengths; None where there are no two lengths."""
  lines = [
    line
    for one in shown
    for run in one.done
    if len(found := _last(run)) > 1
    for line in found.values()
  ]
  return quality.common(lines) if lines else None


def at_lengths(one: Summary, name: str) -> AtLengths:
  """A metric at the end of training, of the seeds that have it; growing."""
  found: AtLengths = {}
  for run in one.done:
    for length, line in _last(run).items():
      if quality.is_number(line.get(name)):
        found.setdefault(length, []).append(line[name])
  return {n: found[n] for n in sorted(found, key=_order)}


def table(summaries: Sequence[Summary]) -> Table | None:
  """Means over seeds, a column a length; None without two lengths."""
  shown = [one for one in summaries if one.done]
  name = metric(shown)
  if name is None:
    return None
  found = [(one, at_lengths(one, name)) for one in shown]
  found = [(one, values) for one, values in found if len(values) > 1]
  lengths = sorted({n for _, values in found for n in values}, key=_order)
  across = words.across_leaves(shown)
  trained = _trained(shown)
  header = ["attention", *map(words.short, across), "seeds"]
  header += [
    "trained" if n is None else f"{n} (trained)" if n == trained else str(n)
    for n in lengths
  ]
  rows = []
  for one, values in found:
    row = [one.attention, *(str(one.across.get(leaf, "–")) for leaf in across)]
    row.append(f"{len(one.done)}/{len(one.runs)}")
    row += [
      numbers.interval([statistics.fmean(values[n])]) if n in values else "–"
      for n in lengths
    ]
    rows.append(row)
  return Table(header, rows, 1 + len(across))


def figure(
  task: str, shown: Sequence[Summary], styles: Mapping[str, Style]
) -> Figure:
  """Quality against length / trained length, a panel for each `across` point.

  Args:
    task: file in configs/.
    shown: the rows that have something to show.
    styles: label of a mechanism -> how it is drawn.
  """
  name = metric(shown)
  panels = {}
  if name:
    have = [
      one for one in shown if _trained([one]) and len(at_lengths(one, name)) > 1
    ]
    values = [
      x for one in have for of in at_lengths(one, name).values() for x in of
    ]
    limits = axes_lib.limits(values, quality.highest(name))
    panels = {
      point or name: figures.titled(
        point, functools.partial(_panel, of_point, styles, name, limits)
      )
      for point, of_point in summary.by_point(have).items()
    }
  return Figure(
    f"lengths-{words.stem(task)}",
    f"{task}: {name} at other lengths than the trained one (the grey line), at "
    "the end of training. Lines are means over seeds, bands go from the lowest "
    "to the highest seed.",
    panels,
    size=_SIZE,
  )


def _panel(
  shown: Sequence[Summary],
  styles: Mapping[str, Style],
  name: str,
  limits: tuple[float, float],
  axes: Any,
) -> Finish:
  last, ratios = [], []
  for one in shown:
    found = at_lengths(one, name)
    trained = _trained([one])
    x = [n / trained for n in found if n and trained]
    values = list(found.values())
    mean = [statistics.fmean(of) for of in values]
    mark = styles[one.attention]
    with marks.of(axes, one.attention):
      axes.plot(
        x, mean, color=mark.color, linestyle=mark.dash, marker=mark.marker
      )
      if any(min(of) < max(of) for of in values):
        low, high = [min(of) for of in values], [max(of) for of in values]
        axes.fill_between(
          x, low, high, color=mark.color, alpha=0.1, linewidth=0
        )
    label = Label(words.beside(one.attention), x[-1], mean[-1], mark.color)
    last.append((one.attention, label))
    ratios += x
  axes.axvline(1, color=style.MUTED, linewidth=0.8, zorder=0)
  axes_lib.at_places(axes, ratios, lambda ratio: f"{ratio:.3g}")
  axes.set_ylim(*limits)
  trained = _trained(shown)
  axes.set_xlabel(
    "length / trained length" + (f" of {trained}" if trained else "")
  )
  axes.set_ylabel(name)
  return marks.ends(axes, last)


def _last(run: Record) -> dict[int | None, Mapping[str, Any]]:
  """Length -> the last evaluation at it; empty for a task of one length."""
  last = {line["split"]: line for line in run.get("history", ())}
  found: dict[int | None, Mapping[str, Any]] = {
    int(match[1]): line
    for split, line in last.items()
    if (match := _OTHER.fullmatch(split))
  }
  trained = next((last[split] for split in _TRAINED if split in last), None)
  if found and trained is not None:
    found[run.get("length")] = trained
  return found


def _trained(shown: Sequence[Summary]) -> int | None:
  """The length that all rows are trained at; None where it is not one."""
  found = {run.get("length") for one in shown for run in one.done}
  return found.pop() if len(found) == 1 else None


def _order(length: int | None) -> int:
  """Sorts lengths by size, one that is not known first."""
  return length or 0
