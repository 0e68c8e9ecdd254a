"""Labels and pictures of the attention of a Perceiver's latents."""

from collections.abc import Iterable, Mapping
import pathlib
from typing import Any

import numpy as np

import models
from projects.perceiver.config import PerceiverConfig
from settings.errors import ConfigError
from training.pictures import attention_maps, overlay

NUM_LATENTS = 10
"""Number of latents in a picture over an image."""


def axes(
  config: PerceiverConfig, name: str, inputs: tuple[str, list[str]]
) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
  """Returns the names of a map's rows and columns, with their labels.

  Args:
    config: config of the model.
    name: name of the map, such as 'encoder/cross_attention'.
    inputs: the name of an input, 'token' or 'pixel', and the labels of all inputs.
  """
  latents = "latent", [str(i + 1) for i in range(config.num_latents)]
  if "cross" not in name:
    return latents, latents
  if name.startswith("encoder"):
    return latents, inputs
  # There is one output per token, or one for the classes.
  classes = config.head == "class"
  return ("output", ["class"] if classes else inputs[1]), latents


def pixel_labels(shape: tuple[int, ...]) -> list[str]:
  """The row and column of every pixel of an image `[H, W, C]`."""
  return [f"{i},{j}" for i in range(shape[0]) for j in range(shape[1])]


def sort_by_position(weights: np.ndarray) -> np.ndarray:
  """Sorts the latents of weights `[N, M, S]` by the mean position they attend to.

  Negative weights, which some mechanisms have, count as 0.
  """
  mean = np.maximum(weights.mean(0), 0)
  total = np.maximum(mean.sum(1), 1e-30)
  return np.argsort(mean @ np.arange(mean.shape[1]) / total, kind="stable")


def draw_on_image(
  path: pathlib.Path,
  model: Any,
  variables: Mapping[str, Any],
  example: Mapping[str, np.ndarray],
) -> None:
  """Draws the attention of some latents, and that of the class through all latents.

  The attention of the class is the product of its weights over latents, the rollout of
  the layers of the latents, and the weights of latents over pixels. The drawn latents
  are those with the most concentrated attention: their weights, averaged over heads,
  have the largest sums of squares.

  Args:
    path: a .png file.
    model: a Perceiver that reads images.
    variables: variables of the model.
    example: a batch of one image.
  """
  maps = models.attention_maps(model, variables, example)
  image = example["image"][0]

  def mean(name):
    return np.maximum(np.asarray(maps[name])[0].mean(0).astype(float), 0)

  weights = mean("encoder/cross_attention")
  layers = [
    np.asarray(maps[f"encoder_{i}/self_attention"])[0]
    for i in range(model.config.num_layers)
  ] * model.config.num_blocks
  rollout = mean("decoder/cross_attention") @ overlay.rollout(layers) @ weights
  sharpest = np.argsort(-np.square(weights).sum(1))[:NUM_LATENTS]
  rows = {"class, rolled out": rollout[0]}
  rows |= {f"latent {i + 1}": weights[i] for i in np.sort(sharpest)}
  mechanism = model.config.layers("cross_attention")[0].name
  overlay.draw_panels(
    path,
    image,
    [
      overlay.Panel(title, row.reshape(image.shape[:2]), (1, 1))
      for title, row in rows.items()
    ],
    f"attention of latents, mean over heads: {mechanism}",
  )


class LatentPictures:
  """Draws the attention of a Perceiver.

  `training.pictures.attention_maps` and `training.commands.draw_attention` call these
  methods.
  """

  input_file = "image"

  def draw_attention(
    self: Any,
    path: pathlib.Path,
    variables: Mapping[str, Any],
    task: Any,
    batches: Iterable[Mapping[str, np.ndarray]],
  ) -> None:
    """Draws the attention of latents over an image or over a whole text.

    Over a text, latents are sorted by the position that they attend to.
    """
    example = attention_maps.readable_example(batches)
    if "image" in example:
      draw_on_image(path, self, variables, example)
      return
    maps = attention_maps.named_maps(self, variables, task, example)
    first = next(iter(maps.values()))
    order = sort_by_position(first.weights)
    first = first._replace(
      weights=first.weights[:, order],
      query_labels=[first.query_labels[i] for i in order],
    )
    attention_maps.draw_maps(path, [first])

  def name_map(
    self: Any,
    name: str,
    weights: np.ndarray,
    task: Any,
    example: Mapping[str, np.ndarray],
  ) -> attention_maps.NamedMap:
    """Removes padding from `[N, T, S]` weights, and labels the rest."""
    if "image" in example:
      inputs = "pixel", pixel_labels(example["image"].shape[1:])
    else:
      ids = example["source"][0]
      count = attention_maps.length(ids != task.pad_id)
      inputs = "token", task.labels(ids[:count])
    rows, columns = axes(self.config, name, inputs)
    weights = weights[:, : len(rows[1]), : len(columns[1])]
    return weights, rows[1], columns[1], (columns[0], rows[0])

  def draw_input(
    self: Any,
    path: pathlib.Path,
    run: Any,
    variables: Mapping[str, Any],
    file: str,
    query: Any,
  ) -> None:
    """Draws the attention of latents to the image in a file."""
    if query is not None:
      raise ConfigError(
        "--query: only models of patches support it; a Perceiver shows its latents"
      )
    example = {"image": run.task.read(file)[None]}
    draw_on_image(path, self, variables, example)
