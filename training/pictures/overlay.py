"""Draws attention weights over the input image of a model."""

from collections.abc import Sequence
import math
import pathlib
from typing import NamedTuple

import numpy as np

_INCHES = 2.0


def rollout(layers: Sequence[np.ndarray]) -> np.ndarray:
  """Computes attention rollout: the fraction of each input token in each output.

      A_L · … · A_1,   A_l = ½ mean over heads of the weights + ½ I,

  with normalised rows. Negative weights, which some mechanisms have, count as 0.

  Args:
    layers: attention weights `[N, T, T]`, starting with the first layer.

  Returns:
    `[T, T]`; every row sums to 1.

  Paper: Quantifying attention flow in transformers, section 3, Abnar and
  Zuidema 2020, arXiv:2005.00928.
  """
  identity = np.eye(layers[0].shape[-1])
  joint = identity
  for weights in layers:
    mean = np.maximum(weights.mean(0).astype(float), 0)
    # The output of a row without attention is its own token.
    mixed = mean / np.maximum(mean.sum(1, keepdims=True), 1e-30) + identity
    joint = mixed / mixed.sum(1, keepdims=True) @ joint
  return joint


class Panel(NamedTuple):
  """The attention of one token to an image.

  Attributes:
    title: title of the panel.
    weights: weights on a grid, `[rows, columns]`.
    side: height and width of a grid cell in pixels.
    borders: rows and columns of pixels at which a line is drawn.
  """

  title: str
  weights: np.ndarray
  side: tuple[int, int]
  borders: tuple[Sequence[int], Sequence[int]] = ((), ())


def draw_panels(
  path: pathlib.Path, image: np.ndarray, panels: Sequence[Panel], heading: str
) -> None:
  """Writes a .png of an image `[H, W, C]` and of panels with weights over it."""
  from matplotlib.figure import Figure

  low, high = image.min(), image.max()
  pixels = (image - low) / max(float(high - low), 1e-6)
  # An image with one channel is grey.
  pixels = pixels[:, :, 0] if pixels.shape[2] == 1 else pixels[:, :, :3]
  columns = min(4, len(panels) + 1)
  rows = math.ceil((len(panels) + 1) / columns)
  figure = Figure(
    figsize=(_INCHES * columns, (_INCHES + 0.25) * rows + 0.4),
    layout="constrained",
  )
  original, *others = figure.subplots(rows, columns, squeeze=False).flat
  original.imshow(pixels, cmap="gray", interpolation="nearest")
  original.set_title("image", fontsize=9)
  for axis, panel in zip(others, panels, strict=False):
    weights = np.kron(panel.weights, np.ones(panel.side))
    weights = weights[: len(image), : image.shape[1]]
    background = pixels[: len(weights), : weights.shape[1]]
    axis.imshow(background, cmap="gray", interpolation="nearest")
    top = max(float(panel.weights.max()), 1e-6)
    axis.imshow(
      weights,
      cmap="inferno",
      alpha=0.7,
      vmin=0,
      vmax=top,
      interpolation="nearest",
    )
    for row in panel.borders[0]:
      axis.axhline(row - 0.5, color="white", linewidth=1)
    for column in panel.borders[1]:
      axis.axvline(column - 0.5, color="white", linewidth=1)
    axis.set_title(f"{panel.title}, up to {top:.2f}", fontsize=9)
  for axis in (original, *others):
    axis.set_axis_off()
  figure.suptitle(heading)
  figure.savefig(path, dpi=120)
