"""Images in batches, and the share of them that is named rightly."""

from collections.abc import Iterator, Sequence
import json
import pathlib
from typing import NoReturn

import numpy as np

from projects.vision import sources
from projects.vision.augmentation import vary
from projects.vision.sources import Images
from projects.vision.task_config import ImageConfig
from settings.memory import check_fits
from tasks import base, label_names, pixels
from tasks.answers import AnswersInPlace
from tasks.base import Batch, DataError
from tasks.files import read_bytes, typed_path

_SHAPE_FILE = "image_shape.json"
_PIXEL_BYTES = 4


class ImageTask(AnswersInPlace):
  """Images, and one of a few labels as the answer.

  A batch has 'image' [B, H, W, C] float32, 'targets' [B, 1] int32 and 'weights'
  [B, 1] float32. With m the largest value that a pixel may have, x becomes

      (x / m − 1/2) / (1/2)   in [−1, 1].

  Attributes:
    names: of the classes; a label is a place among them.
    input_shapes: input name → shape of one example: {'image': (H, W, C)}.
  """

  source_vocab_size = None
  shared_vocabulary = False
  max_source_length = None
  max_target_length = 1
  pad_id, bos_id, eos_id = base.PAD, base.BOS, base.EOS
  eval_splits: tuple[str, ...]

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
    """`images` is None for a restored task, which names classes only."""
    self._config = config
    self._images = images
    self._batch_size = batch_size
    self._seed = seed
    self.names = list(names)
    self.input_shapes = {"image": shape}
    self.target_vocab_size = len(self.names)
    self.eval_splits = () if images is None else ("validation",)
    self._brightest = 0 if images is None else images.brightest

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B images: all of them once in an order of their own, then again."""
    assert self._images is not None, "a restored task has no data"
    train = self._images.train
    # What varies them is drawn for all rows.
    indices = base.indices(step, self._batch_size, None)
    places = base.epoch_order(indices, len(train.labels), self._seed)
    images = vary(
      train.images[places],
      shift=self._config.shift,
      flip=self._config.flip,
      rng=np.random.default_rng((self._seed, step, 1)),
    )
    return base.only(self._batch(images, train.labels[places]), rows)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Every held-out image once, in the order of the source, as it is."""
    if split not in self.eval_splits or self._images is None:
      raise KeyError(split)
    images, labels = self._images.validation
    for start in range(0, len(labels), self._batch_size):
      rows = slice(start, start + self._batch_size)
      batch = self._batch(images[rows], labels[rows])
      yield base.pad_rows(batch, self._batch_size)

  def read(self, path: str) -> np.ndarray:
    """The pixels [H, W, C] of a PNG or JPEG file as a model reads them.

    Raises:
      DataError: there is no such file, it is not an image, or has other
        channels than those of this task.
    """
    file = typed_path(path)
    if not file.is_file():
      raise DataError(f"{file}: no such file")
    found = pixels.decode(read_bytes(file), str(file))
    channels = self.input_shapes["image"][2]
    if found.shape[2] != channels:
      raise DataError(
        f"{file}: expected {channels} channels, as the images of this run have, "
        f"got {found.shape[2]}"
      )
    return _scaled(found, 255)

  def encode(self, line: str) -> NoReturn:
    """Raises ValueError: an image is not typed."""
    raise ValueError(f"expected an image, which is not typed, got {line!r}")

  def encode_target(self, line: str) -> list[int]:
    """The id of a label."""
    return [label_names.find(self.names, line)]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Names of classes."""
    return " ".join(self.labels(ids))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The name of each class."""
    return [self.names[int(i)] for i in ids]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the names of the classes and the shape of an image."""
    label_names.save(self.names, directory)
    base.save_vocabulary(directory, {_SHAPE_FILE: self._shape()})

  def check_run(self, workdir: pathlib.Path | None) -> None:
    """Raises DataError where a run has other classes or another shape."""
    label_names.check(self.names, workdir)
    base.check_vocabulary(workdir, _SHAPE_FILE, self._shape())

  def _shape(self) -> bytes:
    return json.dumps(self.input_shapes["image"]).encode()

  def _batch(self, images: np.ndarray, labels: np.ndarray) -> Batch:
    return {
      "image": _scaled(images, self._brightest),
      "targets": labels[:, None],
      "weights": np.ones((len(labels), 1), np.float32),
    }


def _scaled(images: np.ndarray, brightest: int) -> np.ndarray:
  half = np.float32(0.5)
  return (images / np.float32(brightest) - half) / half


def make(
  config: ImageConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> ImageTask:
  """Makes the task: reads all images into memory.

  Args:
    config: which images, and how they are varied.
    kind: the `layout` of the model; 'encoder' only.
    batch_size: images of every batch.
    seed: of the order of training, and of how images are varied.
    workdir: of a run; its classes and the shape of its images must be the same.
    restore: take those of the run and read no data.

  Raises:
    ValueError: a kind of model that this task cannot feed, a shift that moves
      an image out of sight, or batches that no machine can hold.
    DataError: in one line, what is wrong with the data.
  """
  base.layout("image", kind, ("encoder",))
  if restore:
    names = label_names.load(workdir)
    height, width, channels = json.loads(
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
  check_fits(
    "batch_size",
    f"{batch_size:,} images of {sources.size(shape)}",
    batch_size * int(np.prod(shape)) * _PIXEL_BYTES,
  )
  task = ImageTask(
    config, names, shape, images, batch_size=batch_size, seed=seed
  )
  if not restore:
    task.check_run(workdir)
  return task
