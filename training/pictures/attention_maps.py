"""What a model attends to in one example, as matrices and as a picture."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

import models
import tasks

MAX_LABELS = 64
"""Axes longer than this have positions in place of tokens."""

_READABLE_TOKENS = 24
_PART_OF_A_LONG_ROW = 12
_INCHES_PER_LABEL = 0.22
_INCHES_UNLABELLED = 6.0
_CELL_INCHES = 9.0
_POINTS = (4.0, 7.0)  # Of a readable name, and of one that has room.
_MAX_PIXELS = 6000

NamedMap = tuple[np.ndarray, list[str], list[str], tuple[str, str]]
"""Weights `[N, T, S]`, names of rows and of columns, and what columns and rows are."""


class AttentionMap(NamedTuple):
  """What one layer attends to in one example, padding left out.

  Attributes:
    weights: `[N, T, S]`, a matrix a head.
    query_labels: T names of rows.
    key_labels: S names of columns.
    axes: what columns and rows are.
    title: which layer.
    mechanism: of that layer.
  """

  weights: np.ndarray
  query_labels: Sequence[str]
  key_labels: Sequence[str]
  axes: tuple[str, str]
  title: str
  mechanism: str

  def cut(self) -> "AttentionMap":
    """A part of it that is small enough for every token to be named."""
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
  """Draws what the last layer attends to in one example, a panel a head.

  A model with a `draw_attention` of its own, `(path, variables, task, batches)`,
  is drawn by that, and any other by `draw_tokens`.

  Args:
    path: a .png file.
    model: the module.
    variables: its variables.
    task: for the labels of tokens.
    batches: held-out rows; the most readable of them is drawn.
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
  """As `draw_attention`, token against token, for a model of any kind.

  Encoder-decoders show cross-attention, the word that is being written against
  the words of the source; other models show self-attention. Where that layer is
  dense in a model that has another mechanism, the last layer of the other one
  comes above it.
  """
  maps = named_maps(model, variables, task, readable_example(batches))
  *_, last = maps.values()
  others = [one for one in maps.values() if one.mechanism != "dense"]
  shown = [last]
  if others and last.mechanism == "dense":
    shown = [others[-1], last]
  draw_maps(path, [one.cut() for one in shown])


def named_maps(
  model: Any,
  variables: Mapping[str, Any],
  task: tasks.Task,
  example: Mapping[str, np.ndarray],
) -> dict[str, AttentionMap]:
  """The attention of every layer, its rows and columns named, in order.

  Args:
    model: the module; one with a `name_map` of its own, `(name, weights, task,
      example) -> NamedMap`, names its rows and columns by that.
    variables: its variables.
    task: for the labels of tokens.
    example: a batch of one.

  Returns:
    'encoder_1_self_attention', 'decoder_1_cross_attention', … → its map; the
    encoder's first, and of a layer the cross-attention last.
  """
  name_map: Callable[..., NamedMap] = getattr(model, "name_map", _name_tokens)
  maps = {}
  for name, weights in models.attention_maps(model, variables, example).items():
    block, kind = name.split("/")
    side, _, index = block.partition("_")
    # The recurrent decoder has one attention, for all of its layers.
    number = int(index) + 1 if index else 0
    place = (side == "decoder", number, "cross" in kind)
    shown = name_map(name, np.asarray(weights)[0], task, example)
    maps[place] = (
      f"{side}_{number}_{kind}" if index else f"{side}_{kind}",
      AttentionMap(
        *shown,
        title=(f"{side} layer {number}" if index else side)
        + f", {kind.replace('_', '-')}",
        mechanism=_mechanism(model, side, number, kind),
      ),
    )
  return dict(maps[place] for place in sorted(maps))


def sketch(
  model: Any, variables: Mapping[str, Any], task: tasks.Task
) -> dict[str, Any]:
  """What the last layer of the first stack attends to in a held-out example.

  Of an encoder-decoder that is the encoder, where most mechanisms can work, so
  that their maps are of the same thing. Where dense attention fills it in place of
  a mechanism that cannot, it is the last layer that has the mechanism.

  Returns:
    JSON-ready: 'title', 'mechanism', 'query_axis', 'key_axis', 'query_labels',
    'key_labels', and 'weights' of every head, rounded to four digits.
  """
  batches = task.eval_batches(task.eval_splits[0])
  maps = named_maps(model, variables, task, readable_example(batches))
  side = next(iter(maps)).split("_")[0]
  stack = [one for name, one in maps.items() if name.startswith(side)]
  others = [one for one in maps.values() if one.mechanism != "dense"]
  if others and all(one.mechanism == "dense" for one in stack):
    stack = others
  shown = stack[-1].cut()
  return {
    "title": shown.title,
    "mechanism": shown.mechanism,
    "query_axis": shown.axes[1],
    "key_axis": shown.axes[0],
    "query_labels": list(shown.query_labels),
    "key_labels": list(shown.key_labels),
    "weights": shown.weights.astype(float).round(4).tolist(),
  }


def figure(maps: Sequence[AttentionMap]) -> Any:
  """The heads of layers, a layer below the other, tokens named.

  An axis of more than `MAX_LABELS` tokens has positions instead. Weights below
  0, which some mechanisms have, are red where those above are blue.

  Returns:
    A figure of matplotlib, whose dpi gives each weight a pixel of its own.
  """
  # Nothing is drawn before the end of a run.
  from matplotlib.figure import Figure

  widths, heights = zip(*map(_size, maps), strict=True)
  size = (max(widths), sum(heights))
  longest = max(max(shown.weights.shape[1:]) for shown in maps)
  # Unless there are too many weights for pixels of their own.
  dpi = min(
    max(120, 1.25 * longest / _INCHES_UNLABELLED), _MAX_PIXELS / max(size)
  )
  drawn = Figure(size, dpi, layout="constrained")
  parts = drawn.subfigures(
    len(maps), 1, squeeze=False, height_ratios=heights, hspace=0.05
  )
  for part, shown in zip(parts.flat, maps, strict=True):
    _draw_heads(part, shown, _grid(len(shown.weights)))
  return drawn


def overview(maps: Sequence[AttentionMap]) -> Any:
  """All layers for the cell of a notebook: a row a layer, a panel a head.

  It is at most 9 inches wide. Tokens are named where they have room, and are
  positions elsewhere.

  Returns:
    A figure of matplotlib.
  """
  # Nothing is drawn before the end of a run.
  from matplotlib.figure import Figure

  columns = max(len(shown.weights) for shown in maps)
  side = min(2.0, (_CELL_INCHES - 1.2) / columns)
  size = (side * columns + 1.2, (side + 0.8) * len(maps))
  drawn = Figure(size, layout="constrained")
  parts = drawn.subfigures(len(maps), 1, squeeze=False)
  for part, shown in zip(parts.flat, maps, strict=True):
    _draw_heads(part, shown, (1, columns), 0.85 * side)
  return drawn


def draw_maps(path: pathlib.Path, maps: Sequence[AttentionMap]) -> None:
  """Writes `figure` as a .png."""
  figure(maps).savefig(path)


def _grid(num_heads: int) -> tuple[int, int]:
  """Rows and columns of the panels of a layer."""
  columns = math.ceil(math.sqrt(num_heads))
  return math.ceil(num_heads / columns), columns


def _size(shown: AttentionMap) -> tuple[float, float]:
  """Width and height of a layer's panels, in inches."""

  def inches(least, num_labels):
    if num_labels > MAX_LABELS:
      return _INCHES_UNLABELLED
    return max(least, _INCHES_PER_LABEL * num_labels) + 1

  heads, num_queries, num_keys = shown.weights.shape
  rows, columns = _grid(heads)
  width, height = inches(2.5, num_keys), inches(2.0, num_queries)
  return columns * width, rows * height + 0.5


def _draw_heads(
  figure: Any,
  shown: AttentionMap,
  grid: tuple[int, int],
  side: float = math.inf,
) -> None:
  """Draws one layer, heads in a grid, whose panels have a side of some inches."""
  weights, (x_axis, y_axis) = shown.weights, shown.axes
  panels = figure.subplots(*grid, sharex=True, sharey=True, squeeze=False)
  least, most = _POINTS

  def points(labels: Sequence[str]) -> float:
    size = min(72 * side / max(len(labels), 1), most)
    return size if size >= least and len(labels) <= MAX_LABELS else 0.0

  top = max(np.abs(weights).max(), 1e-6)  # One scale for all panels.
  signed = weights.min() < -0.01 * top  # Smaller is rounding.
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
      interpolation="nearest",  # Others blur a row into the next.
    )
    panel.set_title(f"head {head + 1}", fontsize=9)
    for set_ticks, labels, options in (
      (panel.set_xticks, shown.key_labels, {"rotation": 90}),
      (panel.set_yticks, shown.query_labels, {}),
    ):
      if size := points(labels):
        # A dollar sign would start a formula.
        escaped = [label.replace("$", r"\$") for label in labels]
        set_ticks(range(len(labels)), escaped, fontsize=size, **options)
  suffix = ", by position"
  small = {} if math.isinf(side) else {"fontsize": 9}
  figure.supxlabel(x_axis + suffix * (not points(shown.key_labels)), **small)
  figure.supylabel(y_axis + suffix * (not points(shown.query_labels)), **small)
  figure.suptitle(f"{shown.title}: {shown.mechanism}", **small)
  figure.colorbar(image, ax=panels, label="attention weight", shrink=0.8)


def _name_tokens(
  name: str,
  weights: np.ndarray,
  task: tasks.Task,
  example: Mapping[str, np.ndarray],
) -> NamedMap:
  """Cuts padding off the `[N, T, S]` weights of a layer and names the rest."""
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
  """The mechanism of a layer, counted from 1; of a side's only layer, from 0."""
  slot = kind if kind == "cross_attention" else f"{side}_attention"
  chosen = model.config.attentions[slot]
  layer = number - 1 if number else int(side == "decoder")
  return chosen[layer % len(chosen)].name


def length(present: np.ndarray) -> int:
  """One past the last True, at least 1: what is not padding."""
  places = np.flatnonzero(present)
  return int(places[-1]) + 1 if len(places) else 1


def readable_example(
  batches: Iterable[Mapping[str, np.ndarray]],
) -> dict[str, np.ndarray]:
  """The longest row that still makes a readable picture, as a batch of one.

  A part of a long row tells more than a row of a few tokens.
  """
  best, example = -math.inf, {}
  for batch in batches:
    for row, weights in enumerate(batch["weights"]):
      if not weights.any():  # It fills up the last batch.
        continue
      count = length(weights > 0)
      readable = count if count <= _READABLE_TOKENS else _PART_OF_A_LONG_ROW
      if readable > best:
        best = readable
        example = {name: rows[row : row + 1] for name, rows in batch.items()}
  return example
