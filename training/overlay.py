"""Where attention looks, drawn over the picture that a model reads."""

from collections.abc import Sequence
import pathlib
from typing import NamedTuple

import numpy as np

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


class Panel(NamedTuple):
  """What one token sees of an image.

  Attributes:
    title: above it.
    seen: weights on a grid, `[rows, columns]`.
    side: height and width of a place of the grid in pixels.
    borders: rows and columns of pixels at which a line is drawn.
  """

  title: str
  seen: np.ndarray
  side: tuple[int, int]
  borders: tuple[Sequence[int], Sequence[int]] = ((), ())


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
  from matplotlib.figure import Figure

  columns = min(4, len(panels) + 1)
  rows = -(-(len(panels) + 1) // columns)
  figure = Figure(
    figsize=(_INCHES * columns, (_INCHES + 0.25) * rows + 0.4),
    layout="constrained",
  )
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
    for line, places in zip(
      (axis.axhline, axis.axvline), panel.borders, strict=True
    ):
      for place in places:
        line(place - 0.5, color="white", linewidth=1)
    axis.set_title(f"{panel.title}, up to {top:.2f}", fontsize=9)
  for axis in axes:
    axis.set_axis_off()
  figure.suptitle(heading)
  figure.savefig(path, dpi=120)


def _visible(image: np.ndarray) -> np.ndarray:
  """Pixels from 0 to 1, grey without a channel."""
  low, high = image.min(), image.max()
  scaled = (image - low) / max(float(high - low), 1e-6)
  return scaled[:, :, 0] if scaled.shape[2] == 1 else scaled[:, :, :3]
