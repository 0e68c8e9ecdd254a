"""The attention weights of a model for one example, as matrices and as pictures."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple
import warnings

import numpy as np

import models
import tasks

MAX_LABELS = 64
"""Longer axes are labelled by position instead of by token."""

_READABLE_TOKENS = 24
_LONG_ROW_SCORE = 12
_INCHES_PER_LABEL = 0.22
_INCHES_UNLABELLED = 6.0
_CELL_INCHES = 9.0
_POINTS = (4.0, 7.0)  # Smallest and largest font size of a label.
_MAX_PIXELS = 6000

NamedMap = tuple[np.ndarray, list[str], list[str], tuple[str, str]]
"""Weights `[N, T, S]`, labels of rows and of columns, names of the x and y axes."""


class AttentionMap(NamedTuple):
  """The attention weights of one layer for one example, without padding.

  Attributes:
    weights: `[N, T, S]`, one matrix per head.
    query_labels: T labels of rows.
    key_labels: S labels of columns.
    axes: names of the x axis (keys) and of the y axis (queries).
    title: name of the layer.
    mechanism: mechanism of the layer.
  """

  weights: np.ndarray
  query_labels: Sequence[str]
  key_labels: Sequence[str]
  axes: tuple[str, str]
  title: str
  mechanism: str

  def cut(self) -> "AttentionMap":
    """Returns the map of the first tokens, few enough to label each of them."""
    return self._replace(
      weights=self.weights[:, :MAX_LABELS, :MAX_LABELS],
      query_labels=self.query_labels[:MAX_LABELS],
      key_labels=self.key_labels[:MAX_LABELS],
    )


def draw_attention(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  task: tasks.Task,
  batches: Iterable[Mapping[str, np.ndarray]],
) -> None:
  """Draws the attention of the last layer for one example, one panel per head.

  It calls `draw_attention(path, variables, task, batches)` of the model if there is
  one, and `draw_tokens` otherwise.

  Args:
    path: a .png file.
    model: the module.
    variables: its variables.
    task: the task, which labels the tokens.
    batches: held-out rows, from which the most readable one is drawn.
  """
  if hasattr(model, "draw_attention"):
    model.draw_attention(path, variables, task, batches)
  else:
    draw_tokens(path, model, variables, task, batches)


def draw_tokens(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  task: tasks.Task,
  batches: Iterable[Mapping[str, np.ndarray]],
) -> None:
  """Draws a model of any tokens like `draw_attention`.

  For an encoder-decoder, it draws cross-attention, with target words as rows and source
  words as columns; for other models, self-attention. If the last layer is dense in a
  model that also has another mechanism, the last layer of that mechanism is drawn above
  it.
  """
  maps = named_maps(model, variables, task, readable_example(batches))
  *_, last = maps.values()
  others = [x for x in maps.values() if x.mechanism != "dense"]
  selected = [last]
  if others and last.mechanism == "dense":
    selected = [others[-1], last]
  draw_maps(path, [x.cut() for x in selected])


def named_maps(
  model: Any,
  variables: Mapping[str, Any],
  task: tasks.Task,
  example: Mapping[str, np.ndarray],
) -> dict[str, AttentionMap]:
  """Returns the attention of every layer, in order, with labelled rows and columns.

  Args:
    model: the module; if it has a method `name_map(name, weights, task, example) ->
      NamedMap`, that labels the rows and columns.
    variables: its variables.
    task: the task, which labels the tokens.
    example: a batch of one.

  Returns:
    A mapping from 'encoder_1_self_attention', 'decoder_1_cross_attention', … to the
    attention maps: the encoder's first, and within a layer cross-attention last.
  """
  name_map: Callable[..., NamedMap] = getattr(model, "name_map", _name_tokens)
  maps = {}
  for name, weights in models.attention_maps(model, variables, example).items():
    block, kind = name.split("/")
    side, _, index = block.partition("_")
    # The recurrent decoder has one attention module for all of its layers.
    number = int(index) + 1 if index else 0
    order = (side == "decoder", number, "cross" in kind)
    named = name_map(name, np.asarray(weights)[0], task, example)
    maps[order] = (
      f"{side}_{number}_{kind}" if index else f"{side}_{kind}",
      AttentionMap(
        *named,
        title=(f"{side} layer {number}" if index else side)
        + f", {kind.replace('_', '-')}",
        mechanism=_mechanism(model, side, number, kind),
      ),
    )
  return dict(maps[order] for order in sorted(maps))


def sketch(
  model: Any, variables: Mapping[str, Any], task: tasks.Task
) -> dict[str, Any]:
  """Returns the attention of the last layer of the first stack for a held-out example.

  The first stack of an encoder-decoder is the encoder, which most mechanisms support,
  so that their maps show the same module. If the encoder is dense because the mechanism
  does not support it, the map is of the last layer with the mechanism.

  Returns:
    JSON-ready: 'title', 'mechanism', 'query_axis', 'key_axis', 'query_labels',
    'key_labels', and 'weights' of every head, rounded to four digits.
  """
  batches = task.eval_batches(task.eval_splits[0])
  maps = named_maps(model, variables, task, readable_example(batches))
  side = next(iter(maps)).split("_")[0]
  stack = [x for name, x in maps.items() if name.startswith(side)]
  others = [x for x in maps.values() if x.mechanism != "dense"]
  if others and all(x.mechanism == "dense" for x in stack):
    stack = others
  last = stack[-1].cut()
  return {
    "title": last.title,
    "mechanism": last.mechanism,
    "query_axis": last.axes[1],
    "key_axis": last.axes[0],
    "query_labels": list(last.query_labels),
    "key_labels": list(last.key_labels),
    "weights": last.weights.astype(float).round(4).tolist(),
  }


def figure(maps: Sequence[AttentionMap]) -> Any:
  """Draws the heads of layers with labelled tokens, one layer below the other.

  Axes of more than `MAX_LABELS` tokens have positions instead of labels. If a mechanism
  has negative weights, they are red, and positive weights are blue.

  Returns:
    A Matplotlib figure, whose dpi gives each weight at least one pixel.
  """
  # Imported late, because a run draws nothing before its end.
  from matplotlib.figure import Figure

  widths, heights = zip(*map(_size, maps), strict=True)
  size = (max(widths), sum(heights))
  longest = max(max(x.weights.shape[1:]) for x in maps)
  # Fewer dpi if the picture would become too large.
  dpi = min(
    max(120, 1.25 * longest / _INCHES_UNLABELLED), _MAX_PIXELS / max(size)
  )
  panels = Figure(size, dpi, layout="constrained")
  rows = panels.subfigures(
    len(maps), 1, squeeze=False, height_ratios=heights, hspace=0.05
  )
  for row, attention in zip(rows.flat, maps, strict=True):
    _draw_heads(row, attention, _grid(len(attention.weights)))
  return panels


def overview(maps: Sequence[AttentionMap]) -> Any:
  """Draws all layers for a notebook cell: one row per layer, one panel per head.

  The figure is at most 9 inches wide. Axes are labelled by token if the labels fit,
  and otherwise by position.

  Returns:
    A Matplotlib figure.
  """
  # Imported late, because a run draws nothing before its end.
  from matplotlib.figure import Figure

  columns = max(len(x.weights) for x in maps)
  side = min(2.0, (_CELL_INCHES - 1.2) / columns)
  size = (side * columns + 1.2, (side + 0.8) * len(maps))
  panels = Figure(size, layout="constrained")
  rows = panels.subfigures(len(maps), 1, squeeze=False)
  for row, attention in zip(rows.flat, maps, strict=True):
    _draw_heads(row, attention, (1, columns), 0.85 * side)
  return panels


def draw_maps(path: pathlib.Path, maps: Sequence[AttentionMap]) -> None:
  """Writes `figure` as a .png."""
  save(figure(maps), path)


def save(drawn: Any, path: pathlib.Path, **options: Any) -> None:
  """Writes a figure, without Matplotlib's warnings about characters without a glyph.

  Such characters, for example Chinese ones, become boxes.
  """
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
    drawn.savefig(path, **options)


def _grid(num_heads: int) -> tuple[int, int]:
  """Returns the numbers of rows and columns of a layer's panels."""
  columns = math.ceil(math.sqrt(num_heads))
  return math.ceil(num_heads / columns), columns


def _size(attention: AttentionMap) -> tuple[float, float]:
  """Returns the width and the height of a layer's panels, in inches."""

  def inches(minimum, num_labels):
    if num_labels > MAX_LABELS:
      return _INCHES_UNLABELLED
    return max(minimum, _INCHES_PER_LABEL * num_labels) + 1

  heads, num_queries, num_keys = attention.weights.shape
  rows, columns = _grid(heads)
  width, height = inches(2.5, num_keys), inches(2.0, num_queries)
  return columns * width, rows * height + 0.5


def _draw_heads(
  figure: Any,
  attention: AttentionMap,
  grid: tuple[int, int],
  side: float = math.inf,
) -> None:
  """Draws the heads of one layer in a grid; a panel is `side` inches wide."""
  weights, (x_axis, y_axis) = attention.weights, attention.axes
  panels = figure.subplots(*grid, sharex=True, sharey=True, squeeze=False)
  smallest, largest = _POINTS

  def points(labels: Sequence[str]) -> float:
    """Returns the font size of labels; 0 if they do not fit."""
    size = min(72 * side / max(len(labels), 1), largest)
    return size if size >= smallest and len(labels) <= MAX_LABELS else 0.0

  top = max(np.abs(weights).max(), 1e-6)  # All panels share one scale.
  signed = weights.min() < -0.01 * top  # Smaller values are rounding errors.
  image = None
  for head, panel in enumerate(panels.flat):
    if head >= len(weights):
      panel.set_axis_off()
      continue
    image = panel.imshow(
      weights[head],
      cmap="RdBu" if signed else "viridis",
      vmin=-top if signed else 0,
      vmax=top,
      aspect="auto",
      interpolation="nearest",  # Other methods blur adjacent rows.
    )
    panel.set_title(f"head {head + 1}", fontsize=9)
    for set_ticks, labels, options in (
      (panel.set_xticks, attention.key_labels, {"rotation": 90}),
      (panel.set_yticks, attention.query_labels, {}),
    ):
      if size := points(labels):
        # A dollar sign would start a formula.
        escaped = [label.replace("$", r"\$") for label in labels]
        set_ticks(range(len(labels)), escaped, fontsize=size, **options)
  suffix = ", by position"
  small = {} if math.isinf(side) else {"fontsize": 9}
  x_suffix = suffix * (not points(attention.key_labels))
  y_suffix = suffix * (not points(attention.query_labels))
  figure.supxlabel(x_axis + x_suffix, **small)
  figure.supylabel(y_axis + y_suffix, **small)
  figure.suptitle(f"{attention.title}: {attention.mechanism}", **small)
  figure.colorbar(image, ax=panels, label="attention weight", shrink=0.8)


def _name_tokens(
  name: str,
  weights: np.ndarray,
  task: tasks.Task,
  example: Mapping[str, np.ndarray],
) -> NamedMap:
  """Removes padding from the weights `[N, T, S]` of a layer, and labels the tokens."""
  if "cross" in name:
    queries, keys = example["targets"][0], example["source"][0]
    axes = ("source", "target, the token being written")
    num_queries = length(example["weights"][0] > 0)
  else:
    side = "source" if name.startswith("encoder") else "inputs"
    queries = keys = example[side][0]
    axes = ("key token", "query token")
    num_queries = length(keys != task.pad_id)
  num_keys = length(keys != task.pad_id)
  return (
    weights[:, :num_queries, :num_keys],
    task.labels(queries[:num_queries]),
    task.labels(keys[:num_keys]),
    axes,
  )


def _mechanism(model: Any, side: str, number: int, kind: str) -> str:
  """Returns the mechanism of layer `number`, from 1; 0 is the only layer of a side."""
  module = kind if kind == "cross_attention" else f"{side}_attention"
  attentions = model.config.attentions[module]
  layer = number - 1 if number else int(side == "decoder")
  if kind == "second_attention":
    attentions = model.config.decoder_configs[layer].second.attentions[module]
  return attentions[layer % len(attentions)].name


def length(present: np.ndarray) -> int:
  """Returns the length without padding: the index after the last True, at least 1."""
  positions = np.flatnonzero(present)
  return int(positions[-1]) + 1 if len(positions) else 1


def readable_example(
  batches: Iterable[Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
  """Returns the longest row that gives a readable picture, as a batch of one.

  A long row, of which a part is drawn, is preferred to a row of a few tokens.
  """
  best, example = -math.inf, {}
  for batch in batches:
    for row, weights in enumerate(batch["weights"]):
      if not weights.any():  # The row pads the last batch.
        continue
      count = length(weights > 0)
      score = count if count <= _READABLE_TOKENS else _LONG_ROW_SCORE
      if score > best:
        best = score
        example = {name: rows[row : row + 1] for name, rows in batch.items()}
  return example
