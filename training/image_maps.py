"""What a model of patches attends to, drawn over the image it reads."""

from collections.abc import Mapping, Sequence
import math
import pathlib
from typing import Any, NamedTuple

import numpy as np

import models
from models.patches import check_images
from models.size import grid_of
from training import canvas

_INCHES = 2.0


def rollout(layers: Sequence[np.ndarray]) -> np.ndarray:
  """How much of each input token is in each output token, through all layers.

      A_L · … · A_1,   A_l = ½ mean over heads of the weights + ½ I,

  rows normalised. Weights below 0, which some mechanisms have, count as 0.

  Args:
    layers: attention weights `[N, T, T]`, the first layer first.

  Returns:
    `[T, T]`; every row sums to 1.

  Paper: Quantifying attention flow in transformers, section 3, Abnar and
  Zuidema 2020, arXiv:2005.00928.
  """
  joint = np.eye(layers[0].shape[-1])
  for weights in layers:
    mean = np.maximum(weights.mean(0).astype(float), 0)
    # A row that attends to nothing keeps what it has.
    mixed = mean / np.maximum(mean.sum(1, keepdims=True), 1e-30) + np.eye(
      len(mean)
    )
    joint = mixed / mixed.sum(1, keepdims=True) @ joint
  return joint


def layer_grids(model: Any, shape: Sequence[int]) -> list[tuple[int, int]]:
  """Rows and columns of the tokens of every layer.

  Args:
    model: of images.
    shape: of an image, `[H, W, C]`.
  """
  config = model.config
  if isinstance(config, models.PyramidConfig):
    grids = config.grids(shape[0], shape[1])
    return [
      grid
      for grid, depth in zip(grids, config.depths, strict=True)
      for _ in range(depth)
    ]
  return [grid_of(tuple(shape), config.patch_size)] * config.num_layers


def place(
  model: Any, shape: Sequence[int], query: Sequence[str] | None
) -> tuple[int, int] | None:
  """A patch of the first layer.

  Args:
    model: of images.
    shape: of the images, `[B, H, W, C]`.
    query: its row and column, as typed; None is [CLS].

  Returns:
    Row and column; None for [CLS].

  Raises:
    ValueError: there is no such patch, or the image is smaller than one.
  """
  if not isinstance(model.config, models.PyramidConfig):
    check_images(tuple(shape), model.config.patch_size, model.image_shape[2])
  rows, columns = layer_grids(model, shape[1:])[0]
  if query is None:
    return None
  if len(query) == 2 and all(part.strip().isdecimal() for part in query):
    row, column = map(int, query)
    if row < rows and column < columns:
      return row, column
  raise ValueError(
    f"query: expected a row below {rows} and a column below {columns}, as "
    f"--query=0,0, got {','.join(query)}"
  )


def labels(
  model: Any, count: int, shape: Sequence[int] | None = None
) -> list[str]:
  """'[CLS]' and the row and column of every patch.

  Args:
    model: of images.
    count: of tokens.
    shape: of the image, `[H, W, C]`, if not the one that the model is for.
  """
  shape = tuple(shape or model.image_shape)
  rows, columns = min(
    layer_grids(model, shape), key=lambda grid: abs(count - grid[0] * grid[1])
  )
  names = ["[CLS]", "[DIST]"][: count - rows * columns]
  return names + [
    f"{i // columns},{i % columns}" for i in range(count - len(names))
  ]


def draw_on_image(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  example: Mapping[str, np.ndarray],
  query: tuple[int, int] | None = None,
) -> None:
  """Draws where one token looks, a panel a layer, and rolled out over all.

  In a model of stages the token of a layer is the one that covers the patch;
  what is rolled out would end at another grid than it began, and is left out.
  Borders of two-dimensional windows are drawn.

  Args:
    path: a .png file.
    model: of images.
    variables: of the model.
    example: a batch of one image.
    query: row and column of the patch that looks, in the first layer; None is
      [CLS], and the patch in the middle for layers that do not have it.
  """
  maps = models.attention_maps(model, variables, example)
  layers = [
    np.asarray(maps[f"encoder_{i}/self_attention"])[0] for i in range(len(maps))
  ]
  image = example["image"][0]
  grids = layer_grids(model, image.shape)
  rows, columns = grids[0]
  mechanisms = model.config.layers("encoder_attention")
  panels = []
  for i, (weights, grid) in enumerate(zip(layers, grids, strict=True)):
    own = weights.shape[-1] - math.prod(grid)
    token = _token(query, grids[0], grid, own)
    seen = np.maximum(weights.mean(0)[token], 0)[own:].reshape(grid)
    side = _side(model, image.shape, grid)
    panels.append(Panel(f"layer {i + 1}", seen, side, mechanisms[i]))
  if len(set(grids)) == 1:
    own = layers[0].shape[-1] - rows * columns
    seen = rollout(layers)[_token(query, grids[0], grids[0], own)]
    side = _side(model, image.shape, grids[0])
    panels.append(Panel("rolled out", seen[own:].reshape(grids[0]), side))
  has_own = layers[-1].shape[-1] > math.prod(grids[-1])
  name = "[CLS]" if has_own else f"{rows // 2},{columns // 2}"
  if query is not None:
    name = f"{query[0]},{query[1]}"
  heading = f"{name} attends to, mean over heads: {mechanisms[-1].name}"
  draw_panels(path, image, panels, heading)


class Panel(NamedTuple):
  """What one token sees of an image.

  Attributes:
    title: above it.
    seen: weights on a grid, `[rows, columns]`.
    side: height and width of a place of the grid in pixels.
    mechanism: whose windows are drawn, if it has any.
  """

  title: str
  seen: np.ndarray
  side: tuple[int, int]
  mechanism: models.AttentionConfig | None = None


def _side(
  model: Any, shape: Sequence[int], grid: tuple[int, int]
) -> tuple[int, int]:
  """Pixels that a token of a layer stands for."""
  size = model.config.patch_size
  if isinstance(size, int):
    return size, size
  return max(shape[0] // grid[0], 1), max(shape[1] // grid[1], 1)


def _token(
  query: tuple[int, int] | None,
  first: tuple[int, int],
  grid: tuple[int, int],
  own: int,
) -> int:
  """The token of a layer for a patch of the first one."""
  if query is None and own:
    return 0
  query = query or (first[0] // 2, first[1] // 2)
  row, column = (
    at * size // whole
    for at, size, whole in zip(query, grid, first, strict=True)
  )
  return own + row * grid[1] + column


def draw_panels(
  path: pathlib.Path,
  image: np.ndarray,
  panels: Sequence[Panel],
  heading: str,
) -> None:
  """Draws an image, and weights over it.

  Args:
    path: a .png file.
    image: `[H, W, C]`.
    panels: from left to right.
    heading: above all.
  """
  FigureCanvasAgg, Figure = canvas.import_matplotlib()
  columns = min(4, len(panels) + 1)
  rows = -(-(len(panels) + 1) // columns)
  figure = Figure(
    figsize=(_INCHES * columns, (_INCHES + 0.25) * rows + 0.4),
    layout="constrained",
  )
  FigureCanvasAgg(figure)
  axes = [*figure.subplots(rows, columns, squeeze=False).flat]
  shown = _visible(image)
  height, width = image.shape[:2]
  axes[0].imshow(shown, cmap="gray", interpolation="nearest")
  axes[0].set_title("image", fontsize=9)
  for axis, panel in zip(axes[1:], panels, strict=False):
    drawn = np.kron(panel.seen, np.ones(panel.side))[:height, :width]
    axis.imshow(
      shown[: len(drawn), : drawn.shape[1]],
      cmap="gray",
      interpolation="nearest",
    )
    top = max(float(panel.seen.max()), 1e-6)
    axis.imshow(
      drawn,
      cmap="inferno",
      alpha=0.7,
      vmin=0,
      vmax=top,
      interpolation="nearest",
    )
    _draw_windows(axis, panel)
    axis.set_title(f"{panel.title}, up to {top:.2f}", fontsize=9)
  for axis in axes:
    axis.set_axis_off()
  figure.suptitle(heading)
  figure.savefig(path, dpi=120)


def _draw_windows(axis: Any, panel: Panel) -> None:
  """Borders between the windows of a two-dimensional window."""
  if panel.mechanism is None or panel.mechanism.name != "window_2d":
    return
  options = panel.mechanism.options
  window, shift = options.get("window", 7), options.get("shift", 0)
  if min(panel.seen.shape) <= window:
    return
  draw = (axis.axhline, axis.axvline)
  for line, cells, pixels in zip(
    draw, panel.seen.shape, panel.side, strict=True
  ):
    for border in range(shift or window, cells, window):
      line(border * pixels - 0.5, color="white", linewidth=1)


def _visible(image: np.ndarray) -> np.ndarray:
  """Pixels from 0 to 1, grey without a channel."""
  low, high = image.min(), image.max()
  scaled = (image - low) / max(float(high - low), 1e-6)
  return scaled[:, :, 0] if scaled.shape[2] == 1 else scaled[:, :, :3]
