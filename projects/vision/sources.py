"""Three sources of images with one interface, `Images`."""

from collections.abc import Iterable, Iterator, Sequence
import pathlib
from typing import Any, NamedTuple

import numpy as np

from projects.vision.task_config import DIGITS, FOLDER, ImageConfig
from settings.errors import DataError
from tasks import pixels
from tasks.files import read_bytes, typed_path


class Split(NamedTuple):
  """Images for training, or held-out images.

  Attributes:
    images: [N, H, W, C] uint8.
    labels: [N] int32.
  """

  images: np.ndarray
  labels: np.ndarray


class Images(NamedTuple):
  """All images of a source.

  Attributes:
    names: names of the classes; a label is an index into them.
    max_value: the largest possible value of a pixel.
    train: training images, at least one.
    validation: held-out images, at least one.
  """

  names: Sequence[str]
  max_value: int
  train: Split
  validation: Split


def read(config: ImageConfig) -> Images:
  """Reads the images of a config.

  Raises:
    DataError: the data are invalid; the message has one line.
  """
  if config.source == DIGITS:
    return _digits(config.held_out)
  if config.source == FOLDER:
    return _folder(typed_path(config.path), config.held_out)
  return _from_catalogue(config)


def held_out_mask(labels: np.ndarray, share: float) -> np.ndarray:
  """Chooses a share of each class, at least one image but not all.

  The choice depends only on the number of images of the class.

  Args:
    labels: [N]; each label occurs at least twice.
    share: between 0 and 1.

  Returns:
    [N] bool, True for the images that are held out.
  """
  is_held_out = np.zeros(len(labels), bool)
  for label in np.unique(labels):
    members = np.flatnonzero(labels == label)
    count = min(max(1, round(share * len(members))), len(members) - 1)
    order = np.random.default_rng(0).permutation(len(members))
    is_held_out[members[order[:count]]] = True
  return is_held_out


def _split(
  names: Sequence[str], max_value: int, split: Split, share: float, where: str
) -> Images:
  """Divides the images of a source that has no splits."""
  for label, name in enumerate(names):
    count = int((split.labels == label).sum())
    if count < 2:
      raise DataError(
        f"{where}: expected at least 2 images of class {name!r}, one to train "
        f"and one to hold out, got {count}"
      )
  is_held_out = held_out_mask(split.labels, share)
  train, validation = (
    Split(split.images[mask], split.labels[mask])
    for mask in (~is_held_out, is_held_out)
  )
  return Images(names, max_value, train, validation)


def _digits(share: float) -> Images:
  try:
    from sklearn.datasets import load_digits
  except ImportError as error:
    raise DataError(
      f"task.source: {DIGITS} needs scikit-learn, which is not installed: "
      "pip install scikit-learn"
    ) from error
  digits: Any = load_digits()  # Its type includes a tuple, for `return_X_y`.
  names = [str(name) for name in digits.target_names]
  images = digits.images.astype(np.uint8)[..., None]
  split = Split(images, digits.target.astype(np.int32))
  return _split(names, 16, split, share, f"task.source={DIGITS}")


def _folder(folder: pathlib.Path, share: float) -> Images:
  """Reads a folder of class folders; ignores names with a leading dot."""
  if not folder.is_dir():
    raise DataError(f"{folder}: no such folder (task.path)")
  classes = [path for path in _list(folder) if path.is_dir()]
  if len(classes) < 2:
    raise DataError(
      f"{folder}: expected a folder for each of at least 2 classes, got "
      f"{', '.join(path.name for path in classes) or 'none'} (task.path)"
    )
  names = [path.name for path in classes]
  try:
    "".join(names).encode()
  except UnicodeEncodeError:
    raise DataError(
      f"{folder}: expected names of classes in UTF-8, got {names} (task.path)"
    ) from None
  files = [(i, file) for i, c in enumerate(classes) for file in _list(c)]
  seen: dict[pathlib.Path, pathlib.Path] = {}
  for _, file in files:
    # A link to another image could be held out while that one is trained.
    if (other := seen.setdefault(file.resolve(), file)) is not file:
      raise DataError(f"{file}: the same file as {other} (task.path)")
  images = ((i, read_bytes(file), str(file)) for i, file in files)
  split = _stack(images, len(files), "task.path", str(folder))
  return _split(names, 255, split, share, str(folder))


def _list(folder: pathlib.Path) -> list[pathlib.Path]:
  try:
    return sorted(p for p in folder.iterdir() if not p.name.startswith("."))
  except OSError as error:
    raise DataError(f"{folder}: {error.strerror}") from error


def _from_catalogue(config: ImageConfig) -> Images:
  """Reads a dataset of the TFDS catalogue.

  The validation split is held out, or else the test split, or else a share of every
  class of the training split.
  """
  from tasks import catalog

  name = config.source
  builder = catalog.prepare(
    name,
    config.path,
    [("source", feature) for feature in ("image", "label")],
    instead=f"task.source={DIGITS} or {FOLDER}",
    field="source",
  )
  held_out = catalog.held_out_split(builder, name, "source")
  names = getattr(builder.info.features["label"], "names", None)
  if not names or len(names) < 2:
    raise DataError(
      f"task.source: expected {name} to have labels with at least 2 names, got "
      f"{names}"
    )

  def read_split(split: str) -> Split:
    return _stack(
      _examples(builder, split),
      builder.info.splits[split].num_examples,
      "task.source",
      f"{name}, split {split}",
    )

  train = read_split("train")
  if held_out is None:
    return _split(names, 255, train, config.held_out, f"task.source: {name}")
  validation = read_split(held_out)
  shapes = validation.images.shape[1:], train.images.shape[1:]
  _check_shape(*shapes, f"{name} {held_out}", ", as in train")
  return Images(names, 255, train, validation)


def _examples(builder: Any, split: str) -> Iterator[tuple[int, bytes, str]]:
  import tensorflow_datasets as tfds

  from tasks import catalog

  raw = {"image": tfds.decode.SkipDecoding()}
  examples = catalog.examples(builder, split, decoders=raw)
  for i, example in enumerate(examples):
    where = f"{builder.info.full_name}, split {split}, image {i}"
    if example["label"] < 0:
      raise DataError(f"{where}: has no label")
    yield int(example["label"]), example["image"], where


def _stack(
  images: Iterable[tuple[int, bytes, str]], count: int, field: str, where: str
) -> Split:
  """Decodes images of one shape.

  Args:
    images: label, content and name of each image.
    count: number of images.
    field: the config field with the source, for messages.
    where: name of the source, for messages.
  """
  stacked, labels, first = None, np.zeros(count, np.int32), ""
  for i, (label, data, name) in enumerate(images):
    image = pixels.decode(data, name)
    if stacked is None:
      first = name
      stacked = np.zeros((count, *image.shape), np.uint8)
    _check_shape(image.shape, stacked.shape[1:], name, f", as {first}")
    stacked[i], labels[i] = image, label
  if stacked is None:
    raise DataError(f"{where}: no images ({field})")
  return Split(stacked, labels)


def _check_shape(
  shape: Sequence[int], expected: Sequence[int], where: str, like: str = ""
) -> None:
  if shape != expected:
    raise DataError(
      f"{where}: expected {size(expected)} pixels (height × width × channels)"
      f"{like}, got {size(shape)}"
    )


def size(shape: Sequence[int]) -> str:
  """Formats a shape for a reader."""
  return " × ".join(map(str, shape))
