"""Quality against cost, error by layer and mechanism, attention maps."""

from collections.abc import Mapping, Sequence
import functools
import math
from typing import Any, NamedTuple

from projects.swap import rows
from projects.swap.records import OWN, Record
from reports import axes as axes_lib
from reports import comparison_maps, marks, words
from reports.figures import Figure
from reports.labels import Finish, Label
from reports.style import MUTED, Style

_STAGES = {
  "loss": ("as it is put in", 0.35),
  "transfer_loss": ("after the transfer", 0.7),
  "finetune_loss": ("after fine-tuning", 1.0),
}
_COSTS = {
  "step_seconds": ("training step, the window of the text", "s"),
  "long_step_seconds": ("training step at --length", "s"),
  "cache_bytes": ("cache of a window", "B"),
}


class _Scale(NamedTuple):
  """How the values of a heat map are shown.

  Attributes:
    factor: to the unit that is shown.
    range: of the colours, in that unit.
    shown: format of a number.
  """

  factor: float
  range: tuple[float, float]
  shown: str


_ERROR = _Scale(1.0, (0.01, 1.0), ".2g")
_ADDED = _Scale(100.0, (0.1, 100.0), "+.1f")


def figures(
  found: Sequence[Record], styles: Mapping[str, Style]
) -> list[Figure]:
  """All figures; one that nobody has values for is left out.

  Args:
    found: records, that of the model as it is among them.
    styles: label -> how it is drawn.
  """
  drawn = [_quality_cost(found, styles), _heat_maps(found)]
  maps, mechanisms = {}, {}
  for record in found:
    for name, suffix in (("map", ""), ("transfer_map", ", transferred")):
      if name in record:
        label = words.beside(record["attention"]) + suffix
        maps[label], mechanisms[label] = record[name], record["attention"]
  if maps:
    drawn.append(
      comparison_maps.of_maps("maps", "Before and after", maps, mechanisms)
    )
  return [figure for figure in drawn if figure.panels]


def _quality_cost(
  found: Sequence[Record], styles: Mapping[str, Style]
) -> Figure:
  content = [row for row in rows.results(found) if row["loss"] is not None]
  # Of several numbers of kept layers, the first is drawn.
  first = list({row["attention"]: row for row in reversed(content)}.values())
  panels = {
    f"loss against {label}": functools.partial(
      _scatter, first[::-1], styles, cost, label, unit
    )
    for cost, (label, unit) in _COSTS.items()
    if any(row[cost] is not None for row in first)
  }
  stages = [
    text
    for name, (text, _) in _STAGES.items()
    if any(row[name] is not None for row in first)
  ]
  return Figure(
    "quality-cost",
    "Held-out loss against what the mechanism costs in all layers. A line goes "
    f"through the losses of a mechanism: {', '.join(stages)}; the last is "
    "the strongest mark. Dotted: the model as it is.",
    panels,
    columns=min(3, max(len(panels), 1)),
  )


def _scatter(
  content: Sequence[Mapping[str, Any]],
  styles: Mapping[str, Style],
  cost: str,
  label: str,
  unit: str,
  axes: Any,
) -> Finish:
  ends, values = [], []
  for row in content:
    x = row[cost]
    losses = {
      name: row[name]
      for name in _STAGES
      if row[name] is not None and math.isfinite(row[name])
    }
    if x is None or not losses:
      continue
    style = styles[row["attention"]]
    points = list(losses.values())
    with marks.of(axes, row["attention"]):
      axes.plot([x] * len(points), points, color=style.color, linewidth=0.7)
      for name, y in losses.items():
        alpha = 1.0 if y == points[-1] else _STAGES[name][1]
        axes.plot(x, y, color=style.color, marker=style.marker, alpha=alpha)
      if row["attention"] == OWN:
        axes.axhline(points[-1], color=MUTED, linewidth=0.8, linestyle=":")
    end = Label(words.beside(row["attention"]), x, points[-1], style.color)
    ends.append((row["attention"], end))
    values += points
  axes_lib.scale(axes, "x", [end.x for _, end in ends], unit)
  axes_lib.scale(axes, "y", values)
  axes.margins(0.16, 0.14)
  axes.set_xlabel(label)
  axes.set_ylabel("loss, nats")
  return marks.points(axes, ends, [0.0] * len(ends))


def _heat_maps(found: Sequence[Record]) -> Figure:
  have = [record for record in found if record.get("layers")]
  content = rows.layers(found)
  panels = {}
  for name, title, scale in (
    ("error", "error of a layer's output", _ERROR),
    ("transfer_error", "the same after the transfer", _ERROR),
    ("loss_added", "loss added by one layer alone, %", _ADDED),
    ("transfer_loss_added", "the same after the transfer, %", _ADDED),
  ):
    if any(row[name] is not None for row in content):
      draw = functools.partial(_heat, have, content, name, title, scale)
      panels[title] = draw
  most = max((len(record["layers"]) for record in have), default=1)
  size = (max(3.9, 1.7 + 0.38 * most), max(2.2, 0.9 + 0.25 * len(have)))
  return Figure(
    "layers",
    "Rows are mechanisms, columns layers from the first to the last. Error: "
    "distance of a layer's outputs from those of the model's own mechanism on "
    "the same queries, keys and values, relative to these. Loss: with that "
    "layer alone swapped, against the model as it is. The colour goes by the "
    "logarithm, from 0.01 to 1 for an error and from 0.1 to 100 % for a loss.",
    panels,
    size=size,
  )


def _heat(
  have: Sequence[Record],
  content: Sequence[Mapping[str, Any]],
  name: str,
  title: str,
  scale: _Scale,
  axes: Any,
) -> None:
  import numpy as np

  values = []
  for record in have:
    of_one = [r for r in content if r["attention"] == record["attention"]]
    values.append([math.nan if r[name] is None else r[name] for r in of_one])
  matrix = scale.factor * np.asarray(values, float)
  low, high = map(math.log10, scale.range)
  # Of losses that fall, as rounding lets them, the size does not matter.
  shade = np.log10(np.clip(matrix, *scale.range))
  axes.grid(visible=False)
  axes.set_title(title)
  count, most = matrix.shape
  size = min(7.0, 110 / max(most, 1))
  for i, record in enumerate(have):
    # An image a row, which a page can hide.
    with marks.of(axes, record["attention"]):
      axes.imshow(
        shade[i : i + 1],
        extent=(-0.5, most - 0.5, i + 0.5, i - 0.5),
        cmap="Oranges",
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="none",
      )
      for j, value in enumerate(matrix[i]):
        if math.isfinite(value):
          is_dark = shade[i, j] > low + 0.7 * (high - low)
          axes.text(
            j,
            i,
            format(value, scale.shown),
            ha="center",
            va="center",
            fontsize=size,
            color="#ffffff" if is_dark else "#1c1b19",
          )
  axes.set_xlim(-0.5, most - 0.5)
  axes.set_ylim(count - 0.5, -0.5)
  sides = [layer["side"] for layer in have[0]["layers"]]
  several = len(set(sides)) > 1
  ticks = [
    f"{layer['side'][0] if several else ''}{layer['layer']}"
    for layer in have[0]["layers"]
  ]
  axes.set_xticks(range(len(ticks)), ticks)
  names = [_in_lines(record["attention"]) for record in have]
  axes.set_yticks(range(len(names)), names)
  marks.ticks(axes.yaxis, [record["attention"] for record in have])
  axes.tick_params(length=0)
  axes.set_xlabel("layer")


def _in_lines(label: str) -> str:
  """A mechanism's label, its options in a line of their own."""
  name, colon, options = words.beside(label).partition(":")
  return f"{name}\n{options}" if colon else name
