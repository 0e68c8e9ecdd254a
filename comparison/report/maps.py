"""Attention maps of one example, one panel per mechanism, on one scale."""

from collections.abc import Mapping, Sequence
import math
from typing import Any

from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
import numpy as np

from comparison.analysis.task import Task
from comparison.planned_run import label

_READABLE = 32
"""Largest number of tokens that a small panel labels."""
_MOST = 30
"""Largest number of panels."""


def task_map(task: Task) -> tuple[Any | None, str]:
  """The attention weights of each row of a task in the same held-out example.

  Returns:
    The figure, or None if no run has a map; and one line on the rows without a map.
  """
  sketches: dict[str, Mapping[str, Any]] = {}
  for record in task.records:
    if sketch := record.get("measured", {}).get("map"):
      sketches.setdefault(label(record), sketch)
  rows = zip(task.summary["row"], task.summary["name"], strict=True)
  names = {name: sketches.get(row) for row, name in rows}
  maps = {name: sketch for name, sketch in names.items() if sketch}
  missing_names = ", ".join(f"`{name}`" for name in names if name not in maps)
  note = ""
  if maps and missing_names:
    note = (
      f"No map of {missing_names}: the mechanism has no weights over tokens, or no "
      "run has been measured."
    )
  return draw(task.name, maps) if 0 < len(maps) <= _MOST else None, note


def draw(subject: str, maps: Mapping[str, Mapping[str, Any]]) -> Any:
  """Draws several maps in one figure.

  Args:
    subject: start of the title.
    maps: maps names to 'weights' [heads, T, S], 'query_labels', 'key_labels',
      'query_axis', 'key_axis' and 'title', as in a record.
  """
  means = {k: np.asarray(m["weights"], float).mean(0) for k, m in maps.items()}
  top = max(float(weights.max()) for weights in means.values())
  first = next(iter(maps.values()))
  columns = min(4, len(maps))
  rows = math.ceil(len(maps) / columns)
  figure = Figure((2.5 * columns + 0.6, 2.6 * rows + 0.4), layout="constrained")
  panels = figure.subplots(rows, columns, squeeze=False)
  top = max(top, 1e-6)
  norm = PowerNorm(0.5, 0, top, clip=True)
  image: Any = None
  for axes, (name, sketch) in zip(panels.flat, maps.items(), strict=False):
    image = axes.imshow(
      means[name], cmap="Blues", norm=norm, interpolation="none", aspect="auto"
    )
    title = (
      name
      if sketch["title"] == first["title"]
      else f"{name}\n{sketch['title']}"
    )
    axes.set_title(title, fontsize=8)
    axes.grid(visible=False)
    axes.tick_params(length=0, pad=2)
    _name_ticks(axes.xaxis, sketch["key_labels"])
    _name_ticks(axes.yaxis, sketch["query_labels"])
    axes.tick_params(axis="x", rotation=90)
  for axes in list(panels.flat)[len(maps) :]:
    axes.set_visible(False)
  bar = figure.colorbar(
    image, ax=panels, shrink=1 if rows == 1 else 0.6, aspect=30, pad=0.01
  )
  # Equally spaced on the square-root scale, where round numbers would overlap.
  ticks = [top * (n / 4) ** 2 for n in range(5)]
  bar.set_ticks(ticks, labels=[f"{tick:.2g}" for tick in ticks])
  bar.set_label("mean weight of the heads, √ scale")
  figure.supxlabel(first["key_axis"], fontsize=8.5)
  figure.supylabel(first["query_axis"], fontsize=8.5)
  figure.suptitle(f"{subject}: {first['title']}")
  return figure


def _name_ticks(axis: Any, labels: Sequence[str]) -> None:
  if len(labels) > _READABLE:
    return
  axis.set_ticks(
    range(len(labels)), [_visible_token(token) for token in labels]
  )
  axis.set_tick_params(labelsize=min(7.0, 130 / max(len(labels), 1)))


def _visible_token(token: str) -> str:
  """A token with visible characters that are valid in XML."""
  return "".join(
    "␣" if c == " " else c if c.isprintable() else "·" for c in token
  )
