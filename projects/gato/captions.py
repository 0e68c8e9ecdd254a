"""Images of coloured shapes, and sentences that describe them.

An example is a pure function of (seed, split, index); see `tasks.draws`.
"""

from typing import NamedTuple

import numpy as np

from tasks import draws

SIDE = 32
"""Height and width of an image, in pixels."""

PATCH_SIZE = 8

GRID = SIDE // PATCH_SIZE
"""Rows and columns of patches."""

PATCHES_SHAPE = (GRID, GRID, PATCH_SIZE, PATCH_SIZE, 3)

QUARTERS = ("top left", "top right", "bottom left", "bottom right")

SHAPES = ("circle", "square", "triangle")

COLOURS = {
  "red": (230, 30, 30),
  "green": (30, 200, 30),
  "blue": (40, 60, 235),
  "yellow": (240, 220, 40),
  "white": (255, 255, 255),
  "purple": (170, 40, 200),
}

_NOISE = 12
"""Standard deviation of the noise on each pixel, whose largest value is 255."""

_RADIUS = 4, 6
"""Smallest and largest half width of a shape, in pixels."""


class CaptionedImages(NamedTuple):
  """The examples of a batch.

  Attributes:
    images: [B, SIDE, SIDE, 3] uint8.
    captions: B sentences.
  """

  images: np.ndarray
  captions: list[str]


def draw(
  key: np.ndarray, indices: np.ndarray, max_shapes: int
) -> CaptionedImages:
  """Draws images with 1 to `max_shapes` shapes, at most one in each quarter.

  Number, quarters, colours, shapes and sizes are uniform, and a shape has a random
  position within its quarter. Each image has a random dark grey background, with noise.
  The sentence lists the shapes by quarters in row-major order: 'red circle top left,
  blue square bottom right'.

  Args:
    key: key of the split, from `draws.split_key`.
    indices: numbers of the examples.
    max_shapes: largest number of shapes, at most the number of `QUARTERS`.
  """
  quarters = len(QUARTERS)
  numbers = 3 + 6 * quarters
  raw = draws.words(key, indices, numbers)
  counts = 1 + draws.below(raw[:, 0], max_shapes)
  shades = draws.below(raw[:, 1], 60)
  order = draws.distinct(raw[:, 3 : 3 + quarters], quarters)
  words = raw[:, 3 + quarters :].reshape(len(indices), quarters, 5)
  images = np.empty((len(indices), SIDE, SIDE, 3), np.uint8)
  captions = []
  for row, count in enumerate(counts):
    image = np.full((SIDE, SIDE, 3), shades[row], np.float32)
    phrases = []
    for quarter in np.sort(order[row, :count]):
      colour = list(COLOURS)[draws.below(words[row, quarter, 0], len(COLOURS))]
      shape = SHAPES[draws.below(words[row, quarter, 1], len(SHAPES))]
      smallest, largest = _RADIUS
      sizes = largest - smallest + 1
      radius = smallest + int(draws.below(words[row, quarter, 2], sizes))
      margin = SIDE // 2 - 2 * radius
      offsets = [draws.below(x, margin + 1) for x in words[row, quarter, 3:]]
      corner = np.array(divmod(int(quarter), 2)) * (SIDE // 2) + offsets
      image[_coverage(shape, corner, radius)] = COLOURS[colour]
      phrases.append(f"{colour} {shape} {QUARTERS[quarter]}")
    # The noise, too, depends only on the example.
    noise = np.random.default_rng(int(raw[row, 2])).standard_normal(
      image.shape, np.float32
    )
    images[row] = np.clip(image + _NOISE * noise, 0, 255)
    captions.append(", ".join(phrases))
  return CaptionedImages(images, captions)


def patches(images: np.ndarray) -> np.ndarray:
  """Converts images [B, SIDE, SIDE, 3] to patches [B, R, C, P, P, 3] in [0, 1]."""
  grid = images.reshape(-1, GRID, PATCH_SIZE, GRID, PATCH_SIZE, 3)
  return np.swapaxes(grid, 2, 3).astype(np.float32) / np.float32(255)


def _coverage(shape: str, corner: np.ndarray, radius: int) -> np.ndarray:
  """Returns the pixels of a shape whose top left is `corner`, [SIDE, SIDE] bool."""
  y, x = (
    np.arange(SIDE)[:, None] + 0.5 - corner[0],
    np.arange(SIDE)[None, :] + 0.5 - corner[1],
  )
  width = 2 * radius
  is_inside = (y >= 0) & (y <= width) & (x >= 0) & (x <= width)
  if shape == "circle":
    return (y - radius) ** 2 + (x - radius) ** 2 <= radius**2
  if shape == "triangle":
    return is_inside & (np.abs(x - radius) <= y / 2)
  return is_inside
