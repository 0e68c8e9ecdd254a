"""Random shifts and reflections of images."""

import numpy as np


def translate(images: np.ndarray, offsets: np.ndarray) -> np.ndarray:
  """Shifts each image by whole pixels, and fills with 0.

      out[b, y, x] = images[b, y − offsets[b, 0], x − offsets[b, 1]]

  Args:
    images: [B, H, W, C].
    offsets: [B, 2] integers, down and to the right, smaller than H and W.

  Returns:
    [B, H, W, C].
  """
  batch_size, height, width, _ = images.shape
  margin = int(np.abs(offsets).max(initial=0))
  padded = np.pad(images, ((0, 0), (margin, margin), (margin, margin), (0, 0)))
  rows = margin - offsets[:, :1] + np.arange(height)
  columns = margin - offsets[:, 1:] + np.arange(width)
  return padded[
    np.arange(batch_size)[:, None, None],
    rows[:, :, None],
    columns[:, None, :],
  ]


def mirror(images: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Mirrors images [B, H, W, C] left to right where `mask` [B] is True."""
  return np.where(mask[:, None, None, None], images[:, :, ::-1], images)


def augment(
  images: np.ndarray, *, shift: int, flip: bool, rng: np.random.Generator
) -> np.ndarray:
  """Mirrors half of the images [B, H, W, C], then shifts all of them.

  Args:
    images: images of a batch.
    shift: the largest offset; all offsets up to it are equally likely.
    flip: whether to mirror.
    rng: random number generator.

  Returns:
    [B, H, W, C].
  """
  if flip:
    images = mirror(images, rng.random(len(images)) < 0.5)
  if shift:
    offsets = rng.integers(-shift, shift, (len(images), 2), endpoint=True)
    images = translate(images, offsets)
  return images
