"""Attention maps of one example, a panel a mechanism."""

from collections.abc import Mapping, Sequence
import functools
from typing import Any

import numpy as np

from reports import words
from reports.figures import Figure
from reports.summary import Summary

_READABLE = 32
_INCHES = 2.9
_MOST_PANELS = 30


def of_task(task: str, summaries: Sequence[Summary]) -> list[Figure]:
  """One figure, or none where no run has a map, or too many have one.

  Args:
    task: file in configs/.
    summaries: its rows.
  """
  found: dict[str, Mapping[str, Any]] = {}
  mechanisms = {}
  for one in summaries:
    maps = [run.get("measured", {}).get("map") for run in one.done]
    if first := next(filter(None, maps), None):
      name = "\n".join(filter(None, (one.attention, one.point)))
      found[name], mechanisms[name] = first, one.attention
  if not 0 < len(found) <= _MOST_PANELS:
    return []
  return [of_maps(f"maps-{words.stem(task)}", task, found, mechanisms)]


def of_maps(
  stem: str,
  subject: str,
  found: Mapping[str, Mapping[str, Any]],
  mechanisms: Mapping[str, str],
) -> Figure:
  """Maps of one example, a panel each, on one scale.

  Args:
    stem: name of its files.
    subject: what the caption begins with.
    found: label -> what `training.attention_maps.sketch` made.
    mechanisms: label -> the mechanism that it belongs to.
  """
  means = {
    name: np.asarray(one["weights"], float).mean(axis=0)
    for name, one in found.items()
  }
  top = max(float(weights.max()) for weights in means.values())
  first = next(iter(found.values()))
  caption = (
    f"{subject}: what {first['title']} attends to in the same held-out example, "
    f"mean over heads. Rows: {first['query_axis']}; columns: "
    f"{first['key_axis']}. One scale for all panels, from 0 (blank) to "
    f"{top:.2f}, by the square root, so that weak weights show."
  )
  if any((weights < 0).any() for weights in means.values()):
    caption += " Weights below 0 are blank."
  titles = {name: _title(name, one, first) for name, one in found.items()}
  if any(one["title"] != first["title"] for one in found.values()):
    caption += " A panel of another layer names it."
  panels = {
    name: functools.partial(_panel, titles[name], found[name], weights, top)
    for name, weights in means.items()
  }
  size = (_INCHES, _INCHES)
  return Figure(stem, caption, panels, 4, size, mechanisms)


def _title(name: str, one: Mapping[str, Any], first: Mapping[str, Any]) -> str:
  """A panel's name, and what it shows where that does not follow from the name."""
  lines = [name]
  if one.get("mechanism", "") not in name:
    lines.append(one["mechanism"])
  if one["title"] != first["title"]:
    lines.append(one["title"])
  return "\n".join(map(words.beside, lines))


def _panel(
  title: str, one: Mapping[str, Any], weights: np.ndarray, top: float, axes: Any
) -> None:
  from matplotlib.colors import PowerNorm

  axes.imshow(
    weights,
    cmap="Blues",
    norm=PowerNorm(0.5, 0, max(top, 1e-6), clip=True),
    interpolation="none",
    aspect="auto",
  )
  axes.grid(visible=False)
  axes.set_title(title)
  axes.spines[:].set_visible(True)
  axes.spines[:].set_linewidth(0.4)
  axes.tick_params(length=0, pad=2)
  for axis, labels in (
    (axes.xaxis, one["key_labels"]),
    (axes.yaxis, one["query_labels"]),
  ):
    if len(labels) <= _READABLE:
      axis.set_ticks(range(len(labels)), [_visible(label) for label in labels])
      size = min(7.0, 130 / max(len(labels), 1))
      axis.set_tick_params(labelsize=size)
  axes.tick_params(axis="x", rotation=90)


def _visible(label: str) -> str:
  """A token that can be seen, and that XML can hold."""
  return "".join(
    "␣" if c == " " else c if c.isprintable() else "·" for c in label
  )
