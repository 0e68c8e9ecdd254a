"""Images in batches, and classification accuracy."""

from collections.abc import Sequence
import json
import pathlib
from typing import NoReturn

import numpy as np

from projects.vision import sources
from projects.vision.augmentation import augment
from projects.vision.sources import Images
from projects.vision.task_config import ImageConfig
from settings import json_text
from tasks import base, pixels
from tasks.base import Batch, DataError
from tasks.files import read_bytes, typed_path
from tasks.labelled import LabelledTask, load_names

_SHAPE_FILE = "image_shape.json"


class ImageTask(LabelledTask):
  """Images, each with one of a few labels.

  A batch has 'image' [B, H, W, C] float32, 'targets' [B, 1] int32 and 'weights'
  [B, 1] float32. With m the largest value that a pixel may have, x becomes

      (x / m − 1/2) / (1/2)   in [−1, 1].

  Attributes:
    input_shapes: maps input names to the shape of one example: {'image': (H, W, C)}.
  """

  max_target_length = 1

  def __init__(
    self,
    config: ImageConfig,
    names: Sequence[str],
    shape: tuple[int, int, int],
    images: Images | None,
    *,
    batch_size: int,
    seed: int,
  ):
    """Creates the task; `images` is None for a restored task, which has no data."""
    self._splits, self._max_value = {}, 0
    if images is not None:
      self._splits = {"train": images.train, "validation": images.validation}
      self._max_value = images.max_value
    counts = {split: len(x.labels) for split, x in self._splits.items()}
    super().__init__(names, counts, batch_size=batch_size, seed=seed)
    self._config = config
    self.input_shapes = {"image": shape}

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B augmented images; each epoch has every image once, in a new order."""
    # Random numbers are drawn for all rows, even if only some are needed.
    indices = self._train_indices(step, None)
    train = self._splits["train"]
    images = augment(
      train.images[indices],
      shift=self._config.shift,
      flip=self._config.flip,
      rng=np.random.default_rng((self._seed, step, 1)),
    )
    return base.select_rows(self._scaled(images, train.labels[indices]), rows)

  def read(self, path: str) -> np.ndarray:
    """Reads a PNG or JPEG file as scaled pixels [H, W, C].

    Raises:
      DataError: the file does not exist, is not an image, or has another number of
        channels than this task's images.
    """
    file = typed_path(path)
    if not file.is_file():
      raise DataError(f"{file}: no such file")
    image = pixels.decode(read_bytes(file), str(file))
    channels = self.input_shapes["image"][2]
    if image.shape[2] != channels:
      raise DataError(
        f"{file}: expected {channels} channels, as in the images of this run, "
        f"got {image.shape[2]}"
      )
    return _scale(image, 255)

  def encode(self, line: str) -> NoReturn:
    """Raises ValueError, because a line of text is not an image."""
    raise ValueError(
      f"expected an image, got the text {line!r}; "
      "training.commands.draw_attention reads one with --image=FILE"
    )

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Names of classes."""
    return " ".join(self.labels(ids))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The name of each class."""
    return [self.names[int(i)] for i in ids]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the names of the classes and the shape of an image."""
    super().save(directory)
    base.save_vocabulary(directory, {_SHAPE_FILE: self._shape()})

  def check_run(self, workdir: pathlib.Path | None) -> None:
    """Raises DataError if a run has other classes or another shape."""
    super().check_run(workdir)
    base.check_vocabulary(workdir, _SHAPE_FILE, self._shape())

  def _shape(self) -> bytes:
    return json.dumps(self.input_shapes["image"]).encode()

  def _batch(self, split: str, indices: np.ndarray) -> Batch:
    images, labels = self._splits[split]
    return self._scaled(images[indices], labels[indices])

  def _scaled(self, images: np.ndarray, labels: np.ndarray) -> Batch:
    return {
      "image": _scale(images, self._max_value),
      "targets": labels[:, None],
      "weights": np.ones((len(labels), 1), np.float32),
    }


def _scale(images: np.ndarray, max_value: int) -> np.ndarray:
  half = np.float32(0.5)
  return (images / np.float32(max_value) - half) / half


def make(
  config: ImageConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> ImageTask:
  """Reads all images into memory; see `TaskEntry`."""
  base.layout("image", kind, ("encoder",))
  if restore:
    names = load_names(workdir)
    height, width, channels = json_text.loads(
      base.load_vocabulary(workdir, _SHAPE_FILE)
    )
    images, shape = None, (height, width, channels)
  else:
    images = sources.read(config)
    names, shape = images.names, images.train.images.shape[1:]
  if config.shift >= min(shape[:2]):
    raise ValueError(
      f"task.shift: expected less than the height and the width of an image "
      f"({shape[0]} × {shape[1]}), got {config.shift}"
    )
  task = ImageTask(
    config, names, shape, images, batch_size=batch_size, seed=seed
  )
  if not restore:
    task.check_run(workdir)
  return task
