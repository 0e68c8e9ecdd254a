"""Images of TFDS: prepared without TensorFlow, divided, and what is refused."""

import itertools
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.image_classification import cifar

from projects.vision.tests.test_image import held_out, make, picture, rows
import tasks


def test_cifar10_is_prepared_without_tensorflow(
  tmp_path, empty_cache, monkeypatch
):
  # The files of its authors: a label, then the red, green and blue pixels.
  folder = tmp_path / "cifar-10-batches-bin"
  folder.mkdir()
  rng = np.random.default_rng(0)
  names = [f"name{i}" for i in range(10)]
  (folder / "batches.meta.txt").write_text("\n".join(names) + "\n\n")
  written = {}
  for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
    labels = rng.integers(0, 10, (4, 1), np.uint8)
    pixels = rng.integers(0, 256, (4, 3, 32, 32), np.uint8)
    records = np.concatenate([labels, pixels.reshape(4, -1)], axis=1)
    (folder / f"{file}.bin").write_bytes(records.tobytes())
    images = (pixels.transpose(0, 2, 3, 1) / np.float32(255) - 0.5) / 0.5
    written[file] = [
      (image.astype(np.float32).tobytes(), label)
      for image, label in zip(images, labels[:, 0], strict=True)
    ]
  monkeypatch.setattr("tasks.catalog._check_network", lambda *_: None)
  monkeypatch.setattr(
    tfds.download.DownloadManager,
    "download_and_extract",
    lambda self, url: str(tmp_path),
  )
  before = cifar.tf
  task = make(source="cifar10", batch_size=4)
  assert "tensorflow" not in sys.modules
  assert cifar.tf is before
  assert task.input_shapes == {"image": (32, 32, 3)}
  assert task.names == names
  assert sorted(held_out(task)) == sorted(written.pop("test_batch"))
  epoch = rows(task.train_batch(step) for step in range(5))
  assert sorted(epoch) == sorted(itertools.chain(*written.values()))


class TinyPictures(tfds.core.GeneratorBasedBuilder):
  """A real TFDS builder, as small as can be."""

  VERSION = tfds.core.Version("1.0.0")
  SPLITS: tuple[str, ...] = ("train", "test")
  LABELS: Any = tfds.features.ClassLabel(names=["cat", "dog"])
  FEATURE = "image"

  def _info(self):
    features = {self.FEATURE: tfds.features.Image(shape=(None, None, 1))}
    features["label"] = self.LABELS
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict(features)
    )

  def _split_generators(self, dl_manager):
    return {name: self._generate_examples(name) for name in self.SPLITS}

  def _generate_examples(self, split):
    for i in range(20 if split == "train" else 5):
      yield i, {self.FEATURE: self.picture(split, i), "label": self.label(i)}

  def picture(self, split, i):
    return picture(i + 20 * (split != "train"), 1)

  def label(self, i):
    return i % 2


# Registered by their names, as any set of TFDS is.
FAULTY = {
  "OneSplitPictures": {"SPLITS": ("train",)},
  "TestOnlyPictures": {"SPLITS": ("test",)},
  # The held-out images are higher.
  "UnevenPictures": {
    "picture": lambda self, split, i: np.zeros(
      (6 + (split == "test"), 5, 1), np.uint8
    )
  },
  "UnlabelledPictures": {"label": lambda self, i: -1},
  "CountedPictures": {"LABELS": tfds.features.Scalar(dtype=np.int64)},
  "NamelessPictures": {"FEATURE": "photo"},
}
_SAME = {"__module__": __name__, "VERSION": TinyPictures.VERSION}
SETS = [
  type(name, (TinyPictures,), _SAME | own) for name, own in FAULTY.items()
]


def pictures(batches):
  """(value of the first pixel, label) of each row that has a weight."""
  return [
    (round((np.frombuffer(image, np.float32)[0] + 1) / 2 * 255 / 10), label)
    for image, label in rows(batches)
  ]


def test_a_tfds_set_with_a_split_that_is_held_out(empty_cache):
  task = make(source="tiny_pictures", batch_size=2, flip=True)
  assert task.input_shapes == {"image": (6, 5, 1)}
  assert task.names == ["cat", "dog"]
  epoch = pictures(task.train_batch(step) for step in range(10))
  chosen = pictures(task.eval_batches("validation"))
  assert sorted(epoch) == [(i, i % 2) for i in range(20)]
  assert sorted(chosen) == [(20 + i, i % 2) for i in range(5)]


def test_a_tfds_set_of_one_split_is_divided(empty_cache):
  task = make(source="one_split_pictures", batch_size=2, held_out=0.3)
  epoch = pictures(task.train_batch(step) for step in range(7))
  chosen = pictures(task.eval_batches("validation"))
  assert sorted(epoch + chosen) == [(i, i % 2) for i in range(20)]
  assert sorted(label for _, label in chosen) == [0, 0, 0, 1, 1, 1]


def test_a_tfds_folder_that_has_it_prepared(tmp_path, empty_cache):
  make(source="tiny_pictures")
  (tmp_path / "mine" / "tiny_pictures").mkdir(parents=True)
  (empty_cache / "tfds-tiny_pictures-1.0.0").rename(
    tmp_path / "mine" / "tiny_pictures" / "1.0.0"
  )
  task = make(source="tiny_pictures", path=str(tmp_path / "mine"))
  assert len(pictures(task.eval_batches("validation"))) == 5
  with pytest.raises(tasks.DataError, match="no prepared tiny_pictures/1"):
    make(source="tiny_pictures", path=str(tmp_path / "other"))


@pytest.mark.parametrize(
  ("source", "message"),
  [
    ("no_such_set", "task.source: TFDS has no 'no_such_set'; see"),
    ("test_only_pictures", "task.source: test_only_pictures has no train"),
    ("nameless_pictures", "task.source: nameless_pictures has label, photo;"),
    ("counted_pictures", "task.source: expected counted_pictures to have"),
    ("uneven_pictures", "uneven_pictures test: expected 6 × 5 × 1 pixels"),
    ("unlabelled_pictures", "unlabelled_pictures/1.0.0, split train, image"),
  ],
)
def test_faults_of_sets_are_one_line(empty_cache, source, message):
  with pytest.raises(tasks.DataError) as error:
    make(source=source)
  assert str(error.value).startswith(message)
  assert "\n" not in str(error.value)
