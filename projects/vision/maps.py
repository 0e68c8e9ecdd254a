"""Pictures of the attention of an image model, over its input image."""

from collections.abc import Iterable, Mapping, Sequence
import math
import pathlib
from typing import Any

import jax
import numpy as np

import models
from models.sizes import batch_array
from projects.vision.pyramid_config import PyramidConfig
from tasks.pixels import check_images
from training.pictures import attention_maps
from training.pictures.overlay import Panel, draw_panels, rollout


def layer_grids(model: Any, shape: Sequence[int]) -> list[tuple[int, int]]:
  """Returns the rows and columns of the tokens of each layer.

  Args:
    model: an image model.
    shape: shape of an image, `[H, W, C]`.
  """
  config = model.config
  if isinstance(config, PyramidConfig):
    grids = config.grids(shape[0], shape[1])
    return [
      grid
      for grid, depth in zip(grids, config.depths, strict=True)
      for _ in range(depth)
    ]
  return [config.grid(tuple(shape))] * config.num_layers


def parse_query(
  model: Any, shape: Sequence[int], query: Sequence[str] | None
) -> tuple[int, int] | None:
  """Parses the position of a patch of the first layer.

  Args:
    model: an image model.
    shape: shape of the images, `[B, H, W, C]`.
    query: row and column of the patch as text; None means [CLS].

  Returns:
    Row and column; None for [CLS].

  Raises:
    ValueError: the image has no such patch, or is smaller than a patch.
  """
  if not isinstance(model.config, PyramidConfig):
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
  """Returns '[CLS]', and the row and column of each patch.

  Args:
    model: an image model.
    count: number of tokens.
    shape: shape of the image, `[H, W, C]`; None is that of the model.
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
  """Draws the attention of one token, one panel per layer, and its rollout.

  In a model with stages, the token of a layer is the one that covers the patch, and
  there is no rollout, because the grids of the layers differ. Borders of
  two-dimensional windows are drawn.

  Args:
    path: a .png file.
    model: an image model.
    variables: variables of the model.
    example: a batch of one image.
    query: row and column of the query patch in the first layer; None means [CLS], or
      the central patch in layers without [CLS].
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
    num_special = weights.shape[-1] - math.prod(grid)
    token = _token(query, grids[0], grid, num_special)
    row = np.maximum(weights.mean(0)[token], 0)[num_special:].reshape(grid)
    side = _side(model, image.shape, grid)
    borders = _borders(mechanisms[i], grid, side)
    panels.append(Panel(f"layer {i + 1}", row, side, borders))
  if len(set(grids)) == 1:
    num_special = layers[0].shape[-1] - rows * columns
    row = rollout(layers)[_token(query, grids[0], grids[0], num_special)]
    side = _side(model, image.shape, grids[0])
    row = row[num_special:].reshape(grids[0])
    panels.append(Panel("rolled out", row, side))
  has_class = layers[-1].shape[-1] > math.prod(grids[-1])
  name = "[CLS]" if has_class else f"{rows // 2},{columns // 2}"
  if query is not None:
    name = f"{query[0]},{query[1]}"
  names = " + ".join(dict.fromkeys(config.name for config in mechanisms))
  heading = f"attention of {name}, mean over heads: {names}"
  draw_panels(path, image, panels, heading)


def _side(
  model: Any, shape: Sequence[int], grid: tuple[int, int]
) -> tuple[int, int]:
  """Returns the height and width in pixels of a token of a layer."""
  size = model.config.patch_size
  if isinstance(size, int):
    return size, size
  return max(shape[0] // grid[0], 1), max(shape[1] // grid[1], 1)


def _token(
  query: tuple[int, int] | None,
  first: tuple[int, int],
  grid: tuple[int, int],
  num_special: int,
) -> int:
  """Returns the token of a layer for a patch of the first layer."""
  if query is None and num_special:
    return 0
  query = query or (first[0] // 2, first[1] // 2)
  row, column = (
    coordinate * size // total
    for coordinate, size, total in zip(query, grid, first, strict=True)
  )
  return num_special + row * grid[1] + column


def _borders(
  mechanism: models.AttentionConfig,
  grid: tuple[int, int],
  side: tuple[int, int],
) -> tuple[list[int], list[int]]:
  """Returns the rows and columns of pixels between two-dimensional windows."""
  options = mechanism.options
  window, shift = options.get("window", 7), options.get("shift", 0)
  if mechanism.name != "window_2d" or min(grid) <= window:
    return [], []
  rows, columns = (
    [cell * pixels for cell in range(shift or window, cells, window)]
    for cells, pixels in zip(grid, side, strict=True)
  )
  return rows, columns


class ImageModel:
  """Shared methods of image models: their batches, and pictures of attention.

  `training.pictures.attention_maps` and `training.commands.draw_attention` call the
  methods that draw.
  """

  image_shape: tuple[int, int, int]
  input_file = "image"

  def arguments(
    self, batch: Mapping[str, Any]
  ) -> tuple[tuple[jax.Array], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call on a batch."""
    return (batch_array(batch, "image"),), {}

  def example(self) -> dict[str, np.ndarray]:
    """Returns a batch whose shapes `initialize` uses."""
    return {"image": np.zeros((1, *self.image_shape), np.float32)}

  def draw_attention(
    self,
    path: pathlib.Path,
    variables: Mapping[str, Any],
    task: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
  ) -> None:
    """Draws the attention of [CLS] in one held-out image."""
    del task
    example = attention_maps.readable_example(batches)
    draw_on_image(path, self, variables, example)

  def name_map(
    self, name: str, weights: np.ndarray, task: Any, example: Any
  ) -> attention_maps.NamedMap:
    """Labels both axes of a layer's weights with patches."""
    del name, task, example
    patches = labels(self, weights.shape[-1])
    return weights, patches, patches, ("key patch", "query patch")

  def draw_input(
    self,
    path: pathlib.Path,
    run: Any,
    variables: Mapping[str, Any],
    file: str,
    query: Sequence[str] | None,
  ) -> None:
    """Draws the attention of the patch `query`, or of [CLS], to an image file."""
    image = run.task.read(file)[None]
    patch = parse_query(self, image.shape, query)
    draw_on_image(path, self, variables, {"image": image}, patch)
