"""Figures of a swap: quality against cost, errors by layer, and attention maps."""

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

from matplotlib.figure import Figure
import numpy as np

from comparison.report import maps
from comparison.report import style as style_lib
from comparison.report.figures import legend, shorten
from comparison.report.page import Picture
from comparison.report.style import MUTED
from projects.swap import rows
from projects.swap.records import OWN, Record

_STAGES = {
  "loss": ("directly after the swap", 0.35),
  "transfer_loss": ("after the transfer", 0.7),
  "finetune_loss": ("after fine-tuning", 1.0),
}
_COSTS = ("step_seconds", "long_step_seconds", "cache_bytes")


class _Scale(NamedTuple):
  """The colour scale and number format of a heat map.

  Attributes:
    factor: factor to the shown unit.
    range: range of the colours, in that unit.
    form: format of a number.
  """

  factor: float
  range: tuple[float, float]
  form: str


_ERROR = _Scale(1.0, (0.01, 1.0), ".2g")
_ADDED = _Scale(100.0, (0.1, 100.0), "+.1f")


def pictures(records: Sequence[Record]) -> list[Picture]:
  """Draws all figures that have values.

  Args:
    records: records of the mechanisms and of the original model.
  """
  sketches = {}
  for record in records:
    for name, suffix in (("map", ""), ("transfer_map", ", transferred")):
      if name in record:
        sketches[shorten(record["attention"]) + suffix] = record[name]
  stages = ", ".join(text for text, _ in _STAGES.values())
  figures = (
    Picture(
      "quality-cost",
      _quality_cost(records),
      "Held-out loss against the cost of the mechanism in all layers. A line "
      f"connects the losses of a mechanism ({stages}); the last has the darkest "
      "marker. Dotted: the original model.",
    ),
    Picture(
      "layers",
      _layers(records),
      "Rows are mechanisms, columns are layers from the first to the last. Error: "
      "relative distance of a layer's outputs from those of the model's own "
      "mechanism for the same queries, keys and values. Loss: with only that layer "
      "swapped, relative to the original model. Colours are on a logarithmic scale.",
    ),
    Picture(
      "maps",
      maps.draw("Before and after", sketches) if sketches else None,
      "Attention weights of the last layer in the same held-out text.",
    ),
  )
  return [picture for picture in figures if picture.figure is not None]


def _quality_cost(records: Sequence[Record]) -> Any | None:
  content = [row for row in rows.results(records) if row["loss"] is not None]
  # With several numbers of kept layers, only the first is drawn.
  first = list({row["attention"]: row for row in reversed(content)}.values())
  costs = [name for name in _COSTS if any(row[name] for row in first)]
  if not costs:
    return None
  names = [row["attention"] for row in reversed(first)]
  styles = style_lib.styles(names)
  height = 3.2 + 0.16 * math.ceil(len(names) / 4)
  figure = Figure((3.6 * len(costs), height), layout="constrained")
  panels = figure.subplots(1, len(costs), squeeze=False, sharey=True)[0]
  for name, axes in zip(costs, panels, strict=True):
    cost = rows.COSTS[name]
    for row in first:
      losses = {
        stage: row[stage]
        for stage in _STAGES
        if row[stage] is not None and math.isfinite(row[stage])
      }
      if row[name] is None or not losses:
        continue
      style, points = styles[row["attention"]], list(losses.values())
      x = row[name] * cost.scale
      axes.plot([x] * len(points), points, color=style.color, linewidth=0.7)
      for stage, y in losses.items():
        alpha = 1.0 if y == points[-1] else _STAGES[stage][1]
        axes.plot(x, y, color=style.color, marker=style.marker, alpha=alpha)
      if row["attention"] == OWN:
        axes.axhline(points[-1], color=MUTED, linewidth=0.8, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_xlabel(f"{cost.title}, {cost.unit}")
  panels[0].set_ylabel("held-out loss, nats")
  legend(figure, names, styles)
  return figure


def _layers(records: Sequence[Record]) -> Any | None:
  measured = [record for record in records if record.get("layers")]
  content = rows.layers(records)
  panels = {
    name: (title, scale)
    for name, title, scale in (
      ("error", "error of a layer's output", _ERROR),
      ("transfer_error", "the same after the transfer", _ERROR),
      ("loss_added", "loss added by swapping one layer, %", _ADDED),
      ("transfer_loss_added", "the same after the transfer, %", _ADDED),
    )
    if any(row[name] is not None for row in content)
  }
  if not panels:
    return None
  num_layers = max(len(record["layers"]) for record in measured)
  size = (
    max(3.9, 1.7 + 0.38 * num_layers),
    max(2.2, 0.9 + 0.25 * len(measured)),
  )
  columns = min(2, len(panels))
  lines = math.ceil(len(panels) / columns)
  figure = Figure((columns * size[0], lines * size[1]), layout="constrained")
  all_axes = list(figure.subplots(lines, columns, squeeze=False).flat)
  for axes in all_axes[len(panels) :]:
    axes.set_visible(False)
  for axes, (name, (title, scale)) in zip(
    all_axes, panels.items(), strict=False
  ):
    axes.set_title(title)
    _heat_map(axes, measured, content, name, scale)
  return figure


def _heat_map(
  axes: Any,
  measured: Sequence[Record],
  content: Sequence[Mapping[str, Any]],
  name: str,
  scale: _Scale,
) -> None:
  """Draws a heat map of mechanisms and layers, with its numbers."""
  values = [
    [
      math.nan if row[name] is None else row[name]
      for row in content
      if row["attention"] == record["attention"]
    ]
    for record in measured
  ]
  matrix = scale.factor * np.asarray(values, float)
  low, high = map(math.log10, scale.range)
  # Slight decreases of the loss, from rounding, are clipped.
  shade = np.log10(np.clip(matrix, *scale.range))
  axes.grid(visible=False)
  axes.imshow(
    shade,
    cmap="Oranges",
    vmin=low,
    vmax=high,
    aspect="auto",
    interpolation="none",
  )
  count, num_layers = matrix.shape
  for (i, j), value in np.ndenumerate(matrix):
    if math.isfinite(value):
      is_dark = shade[i, j] > low + 0.7 * (high - low)
      axes.text(
        j,
        i,
        format(value, scale.form),
        ha="center",
        va="center",
        fontsize=min(7.0, 110 / num_layers),
        color="#ffffff" if is_dark else "#1c1b19",
      )
  layers = measured[0]["layers"]
  several = len({layer["side"] for layer in layers}) > 1
  ticks = [
    f"{layer['side'][0] if several else ''}{layer['layer']}" for layer in layers
  ]
  axes.set_xticks(range(num_layers), ticks)
  names = [shorten(r["attention"]).replace(":", "\n", 1) for r in measured]
  axes.set_yticks(range(count), names)
  axes.tick_params(length=0)
  axes.set_xlabel("layer")
