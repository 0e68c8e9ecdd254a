"""What a model of patches attends to, drawn over the image it reads."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

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


def place(model: Any, shape: Sequence[int], query: Sequence[str] | None) -> int:
  """The token of a patch.

  Args:
    model: an encoder with `patch_size`.
    shape: of the images, `[B, H, W, C]`.
    query: its row and column, as typed; None is [CLS].

  Raises:
    ValueError: there is no such patch, or the image is smaller than one.
  """
  size = model.config.patch_size
  check_images(tuple(shape), size, model.image_shape[2])
  rows, columns = grid_of(tuple(shape[1:]), size)
  if query is None:
    return 0
  if len(query) == 2 and all(part.strip().isdecimal() for part in query):
    row, column = map(int, query)
    if row < rows and column < columns:
      return 1 + model.config.distillation + row * columns + column
  raise ValueError(
    f"query: expected a row below {rows} and a column below {columns}, as "
    f"--query=0,0, got {','.join(query)}"
  )


def labels(
  model: Any, count: int, shape: Sequence[int] | None = None
) -> list[str]:
  """'[CLS]' and the row and column of every patch.

  Args:
    model: an encoder with `patch_size`.
    count: of tokens.
    shape: of the image, `[H, W, C]`, if not the one that positions are for.
  """
  own = 1 + model.config.distillation
  names = ["[CLS]", "[DIST]"][:own]
  shape = tuple(shape or model.image_shape)
  _, columns = grid_of(shape, model.config.patch_size)
  return names + [
    f"{i // columns},{i % columns}" for i in range(count - len(names))
  ]


def draw_on_image(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  example: Mapping[str, np.ndarray],
  query: int = 0,
) -> None:
  """Draws where one token looks, a panel a layer, and rolled out over all.

  Args:
    path: a .png file.
    model: an encoder with `patch_size`.
    variables: of the model.
    example: a batch of one image.
    query: the token that looks; 0 is [CLS].
  """
  maps = models.attention_maps(model, variables, example)
  layers = [
    np.asarray(maps[f"encoder_{i}/self_attention"])[0] for i in range(len(maps))
  ]
  image = example["image"][0]
  size = model.config.patch_size
  grid = grid_of(image.shape, size)
  own = layers[0].shape[-1] - grid[0] * grid[1]

  def on_grid(row):
    patches = row[own:].reshape(grid)
    return np.kron(patches, np.ones((size, size)))

  panels = {
    f"layer {i + 1}": on_grid(np.maximum(weights.mean(0)[query], 0))
    for i, weights in enumerate(layers)
  }
  panels["rolled out"] = on_grid(rollout(layers)[query])
  mechanism = model.config.layers("encoder_attention")[-1].name
  name = labels(model, layers[0].shape[-1], image.shape)[query]
  draw_panels(
    path,
    image,
    panels,
    f"{name} attends to, mean over heads: {mechanism}",
  )


def draw_panels(
  path: pathlib.Path,
  image: np.ndarray,
  panels: Mapping[str, np.ndarray],
  heading: str,
) -> None:
  """Draws an image, and weights over it.

  Args:
    path: a .png file.
    image: `[H, W, C]`.
    panels: title -> weights, as large as the image or as its upper left part.
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
  axes[0].imshow(shown, cmap="gray", interpolation="nearest")
  axes[0].set_title("image", fontsize=9)
  for place, (title, weights) in zip(axes[1:], panels.items(), strict=False):
    height, width = weights.shape
    cut = shown[:height, :width]
    place.imshow(cut, cmap="gray", interpolation="nearest")
    top = max(float(weights.max()), 1e-6)
    place.imshow(
      weights,
      cmap="inferno",
      alpha=0.7,
      vmin=0,
      vmax=top,
      interpolation="nearest",
    )
    place.set_title(f"{title}, up to {top:.2f}", fontsize=9)
  for place in axes:
    place.set_axis_off()
  figure.suptitle(heading)
  figure.savefig(path, dpi=120)


def _visible(image: np.ndarray) -> np.ndarray:
  """Pixels from 0 to 1, grey without a channel."""
  low, high = image.min(), image.max()
  scaled = (image - low) / max(float(high - low), 1e-6)
  return scaled[:, :, 0] if scaled.shape[2] == 1 else scaled[:, :, :3]
