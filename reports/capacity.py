"""Quality against the memory of a sequence, a line a mechanism.

The points of a line are the rows of a mechanism: one for each value of the
numeric leaves that a comparison goes across, as the width of a model.
"""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

from reports import axes as axes_lib
from reports import figures, marks, quality, summary, words
from reports.figures import Figure, Panel
from reports.labels import Finish, Label
from reports.style import Style
from reports.summary import Summary

_BYTES = "cache_bytes"
_KIB = 2**-10
_SIZE = (4.4, 3.4)  # Inches: lines cross each other.


def figure(
  task: str, shown: Sequence[Summary], styles: Mapping[str, Style]
) -> Figure:
  """A panel for each combination of the values that are not numbers.

  It has no panels where no numeric leaf has two values, or where all rows of a
  mechanism keep the same memory.

  Args:
    task: file in configs/.
    shown: the rows that have something to show.
    styles: label of a mechanism -> how it is drawn.
  """
  name = summary.headline([run for one in shown for run in one.done])
  numeric = _numeric(shown)
  panels: dict[str, Panel] = {}
  if name and numeric:
    have = [one for one in shown if one.values(name) and one.mean(_BYTES)]
    # Panels are compared with each other, so they share their quality.
    limits = axes_lib.limits(
      [end for one in have for end in one.ends(name)], quality.highest(name)
    )
    for title, of_panel in summary.by_point(have, numeric).items():
      if any(len(set(x)) > 1 for x in _bytes(of_panel).values()):
        panels[title or name] = figures.titled(
          title, functools.partial(_panel, of_panel, styles, name, limits)
        )
  leaves = ", ".join(map(words.short, numeric))
  return Figure(
    f"capacity-{words.stem(task)}",
    f"{task}: {name} against what is kept of a sequence of the greatest length "
    f"while it is generated. The points of a line differ in {leaves}; bars are "
    "95 % intervals over seeds, where there are several. A mechanism that "
    "cannot decode is not there.",
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
  by_mechanism: dict[str, list[tuple[float, float, float, float]]] = {}
  for one in shown:
    x, y = one.mean(_BYTES), one.mean(name)
    if x is not None and y is not None:
      point = (x * _KIB, y, *one.ends(name))
      by_mechanism.setdefault(one.attention, []).append(point)
  last = []
  for attention, points in by_mechanism.items():
    style = styles[attention]
    x, mean, low, high = zip(*sorted(points), strict=True)
    with marks.of(axes, attention):
      # The line stays in front of the bars of others.
      axes.vlines(x, low, high, color=style.color, linewidth=0.8, alpha=0.6)
      axes.plot(
        x, mean, color=style.color, linestyle=style.dash, marker=style.marker
      )
    label = Label(words.beside(attention), x[-1], mean[-1], style.color)
    last.append((attention, label))
  axes_lib.doubling(axes, [x for of in by_mechanism.values() for x, *_ in of])
  axes.set_ylim(*limits)
  axes.set_xlabel("cache and state of a sequence, KiB")
  axes.set_ylabel(name)
  return marks.ends(axes, last)


def _numeric(shown: Sequence[Summary]) -> list[str]:
  """Leaves of `across` with two numbers or more, and nothing but numbers."""
  found = []
  for leaf in words.across_leaves(shown):
    values = [one.across[leaf] for one in shown if leaf in one.across]
    if all(map(quality.is_number, values)) and len(set(values)) > 1:
      found.append(leaf)
  return found


def _bytes(shown: Sequence[Summary]) -> dict[str, list[float | None]]:
  found: dict[str, list[float | None]] = {}
  for one in shown:
    found.setdefault(one.attention, []).append(one.mean(_BYTES))
  return found
