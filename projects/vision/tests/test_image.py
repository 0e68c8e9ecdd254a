"""Classification of images: sources, splits, batches, what is varied."""

import functools
import io
import itertools
import math
import os
import shutil
import struct
import sys
import zlib

import numpy as np
import PIL.Image
import pytest

from projects.vision import augmentation, sources
from projects.vision.task import ImageConfig
import tasks
from tests.tasks import generated_cases

make = functools.partial(
  generated_cases.make, "image", "encoder", batch_size=32
)


def rows(batches):
  """(image, label) of each row that has a weight, ready to be sorted."""
  return [
    (image.tobytes(), int(label[0]))
    for batch in batches
    for image, label, weight in zip(
      batch["image"], batch["targets"], batch["weights"], strict=True
    )
    if weight[0]
  ]


def held_out(task):
  return rows(task.eval_batches("validation"))


def test_the_digits_of_scikit_learn():
  from sklearn.datasets import load_digits

  task = make()
  assert task.input_shapes == {"image": (8, 8, 1)}
  assert task.names == list("0123456789")
  assert task.target_vocab_size == 10
  batch = task.train_batch(0)
  assert batch["image"].shape == (32, 8, 8, 1)
  # An epoch and what is held out are all the digits, from −1 to 1.
  found = load_digits()
  images = (found.images[..., None] / 16 - 0.5) / 0.5
  expected = sorted(
    (image.tobytes(), label)
    for image, label in zip(
      images.astype(np.float32), found.target, strict=True
    )
  )
  task = make(batch_size=1)
  epoch = rows(task.train_batch(step) for step in range(1438))
  assert len(expected) == 1797
  assert sorted(epoch + held_out(task)) == expected


def test_every_training_image_once_an_epoch():
  # 1,438 images are trained: 11 batches of 131 are one too many.
  task = make(batch_size=719)
  first, second = (
    rows(task.train_batch(step) for step in steps) for steps in ((0, 1), (2, 3))
  )
  assert sorted(first) == sorted(second)
  assert first != second
  odd = rows(make(batch_size=131).train_batch(step) for step in range(11))
  assert odd == first + second[:3]


def test_held_out_images_are_a_share_of_every_class():
  task = make(held_out=0.3)
  chosen = held_out(task)
  labels = np.array([label for _, label in chosen])
  # How often each digit was scanned.
  totals = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
  for label, total in enumerate(totals):
    assert (labels == label).sum() == round(0.3 * total)
  again = make(held_out=0.3, seed=5, shift=3, batch_size=7)
  assert held_out(again) == chosen


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_of_every_class_an_image_is_trained_and_one_is_held_out(share):
  labels = np.repeat([4, 0, 7], [2, 3, 97])
  chosen = sources.held_out_mask(labels, share)
  for label, total in ((4, 2), (0, 3), (7, 97)):
    count = chosen[labels == label].sum()
    assert count == np.clip(round(share * total), 1, total - 1)


def naive_shift(image, down, right):
  """One image, pixel by pixel."""
  out = np.zeros_like(image)
  for y, x in np.ndindex(image.shape[:2]):
    to = y + down, x + right
    if all(0 <= i < n for i, n in zip(to, image.shape[:2], strict=True)):
      out[to] = image[y, x]
  return out


@pytest.mark.parametrize("shape", [(5, 7, 3), (3, 3, 1), (1, 7, 1)])
def test_shift_is_a_loop_over_pixels(shape):
  rng = np.random.default_rng(0)
  rows, columns = (range(-n + 1, n) for n in shape[:2])
  offsets = np.array(list(itertools.product(rows, columns)))
  images = rng.integers(1, 256, (len(offsets), *shape), np.uint8)
  moved = augmentation.translate(images, offsets)
  for image, offset, got in zip(images, offsets, moved, strict=True):
    np.testing.assert_array_equal(got, naive_shift(image, *offset))


def test_mirrors_are_a_loop_over_columns():
  rng = np.random.default_rng(0)
  images = rng.integers(0, 256, (6, 3, 5, 3), np.uint8)
  chosen = np.array([True, False, False, True, True, False])
  got = augmentation.mirror(images, chosen)
  for image, is_mirrored, own in zip(got, chosen, images, strict=True):
    np.testing.assert_array_equal(image, own[:, ::-1] if is_mirrored else own)


def test_every_shift_and_mirror_is_as_likely():
  count = 20_000
  images = np.zeros((count, 9, 9, 1), np.uint8)
  images[:, 4, 3] = 1  # Mirrored, it is in column 5.
  rng = np.random.default_rng(0)
  varied = augmentation.augment(images, shift=1, flip=True, rng=rng)
  _, rows, columns, _ = np.nonzero(varied)
  assert len(rows) == count
  frequency = np.zeros((9, 9))
  np.add.at(frequency, (rows, columns), 1 / count)
  expected = np.zeros((9, 9))
  expected[3:6, 2:7] = np.array([1, 1, 2, 1, 1]) / 18
  np.testing.assert_allclose(frequency, expected, atol=0.01)
  assert (frequency[expected == 0] == 0).all()


def test_training_images_are_shifted_ones_of_the_source_and_others_are_not():
  plain, varied = make(), make(shift=2)
  assert held_out(plain) == held_out(varied)
  seen = set()
  for step in range(3):
    first, second = plain.train_batch(step), varied.train_batch(step)
    np.testing.assert_array_equal(first["targets"], second["targets"])
    for image, got in zip(first["image"], second["image"], strict=True):
      # Background is −1 once normalised; the loop fills with 0.
      matches = {
        offset
        for offset in itertools.product(range(-2, 3), repeat=2)
        if np.array_equal(naive_shift(image + 1, *offset) - 1, got)
      }
      assert matches
      seen |= matches
  assert len(seen) == 25


def png(pixels, **options):
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, "png", **options)
  return file.getvalue()


def picture(i, *channels):
  return np.full((6, 5, *channels), 10 * i, np.uint8)


@pytest.fixture
def folder(tmp_path):
  """Six grey images of cats and four of dogs, and files that do not count."""
  folder = tmp_path / "pictures"
  for i in range(10):
    place = folder / ("cat" if i < 6 else "dog")
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{i}.png").write_bytes(png(picture(i)))
  (folder / "cat" / ".DS_Store").write_bytes(b"\0")
  (folder / ".cache").mkdir()
  (folder / "README.txt").write_text("of 2026")
  return folder


def of_folder(folder, **leaves):
  return make(source="folder", path=str(folder), **leaves)


def test_a_folder_of_class_folders(folder):
  task = of_folder(folder, batch_size=4, held_out=0.25)
  assert task.names == ["cat", "dog"]
  assert task.input_shapes == {"image": (6, 5, 1)}
  chosen = held_out(task)
  assert [label for _, label in chosen] == [0, 0, 1]
  epoch = rows(task.train_batch(step) for step in range(7))
  images = [(picture(i, 1) / np.float32(255) - 0.5) / 0.5 for i in range(10)]
  whole = [(x.tobytes(), int(i >= 6)) for i, x in enumerate(images)]
  assert sorted(epoch[:7] + chosen) == sorted(whole)


def test_kinds_of_files(tmp_path):
  rng = np.random.default_rng(0)
  for name in ("a", "b"):
    (tmp_path / name).mkdir()
  colour = rng.integers(0, 256, (4, 5, 3), np.uint8)
  (tmp_path / "a" / "0.png").write_bytes(png(colour))
  # A palette is read as the colours that it stands for.
  palette = PIL.Image.fromarray(colour).quantize(4)
  palette.save(tmp_path / "a" / "1.png")
  # JPEG loses some of it.
  smooth = np.zeros((4, 5, 3), np.uint8) + np.array([200, 100, 50], np.uint8)
  PIL.Image.fromarray(smooth).save(tmp_path / "b" / "0.jpg", quality=95)
  PIL.Image.fromarray(smooth).save(tmp_path / "b" / "1.JPEG", quality=95)
  images = sources.read(ImageConfig(source="folder", path=str(tmp_path)))
  found = np.concatenate([images.train.images, images.validation.images])
  labels = np.concatenate([images.train.labels, images.validation.labels])
  of_a, of_b = found[labels == 0], found[labels == 1]
  wanted = {colour.tobytes(), np.asarray(palette.convert("RGB")).tobytes()}
  assert {image.tobytes() for image in of_a} == wanted
  assert np.abs(of_b.astype(int) - smooth).max() <= 3


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_few_bits_are_stretched_to_eight(folder, bits):
  levels = np.arange(30).reshape(6, 5) % 2**bits
  # Rows of a PNG: a filter of 0, then pixels, the first in the high bits.
  ones = (levels[:, :, None] >> np.arange(bits)[::-1]) & 1
  lines = [b"\0" + np.packbits(line.ravel()).tobytes() for line in ones]
  header = struct.pack(">IIBBBBB", 5, 6, bits, 0, 0, 0, 0)
  content = zlib.compress(b"".join(lines))
  parts = [(b"IHDR", header), (b"IDAT", content), (b"IEND", b"")]
  chunks = [
    struct.pack(
      f">I4s{len(data)}sI", len(data), kind, data, zlib.crc32(kind + data)
    )
    for kind, data in parts
  ]
  file = folder / "dog" / "9.png"
  file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunks))
  images = sources.read(ImageConfig(source="folder", path=str(folder)))
  found = np.concatenate([images.train.images, images.validation.images])
  expected = (levels * 255 // (2**bits - 1)).astype(np.uint8)[..., None]
  assert (found == expected).all(axis=(1, 2, 3)).sum() == 1


def grey16(file):
  file.write_bytes(png(np.full((6, 5), 40_000, np.uint16)))


def saved(mode, kind="png", size=(5, 6)):
  return lambda file: PIL.Image.new(mode, size).save(file, kind)


@pytest.mark.parametrize(
  ("write", "message"),
  [
    (lambda file: file.write_text("hello"), "not a PNG or JPEG image"),
    (lambda file: file.write_bytes(b""), "not a PNG or JPEG image"),
    (saved("L", "gif"), "not a PNG or JPEG image"),
    (lambda file: file.write_bytes(png(picture(1))[:-25]), "damaged image ("),
    (grey16, "expected 8 bits per channel, got a 16-bit PNG"),
    (saved("RGBA"), "expected an image without alpha, got mode RGBA; put it"),
    (saved("LA"), "expected an image without alpha, got mode LA; put it on"),
    (saved("CMYK", "jpeg"), "expected grey or RGB, got mode CMYK"),
    (saved("RGB"), "expected 6 × 5 × 1 pixels (height × width × channels), as"),
    (saved("L", size=(6, 5)), "as {cat}, got 5 × 6 × 1"),
    (lambda file: file.mkdir(), "Is a directory"),
    (lambda file: file.symlink_to(file.with_name("7.png")), "the same file as"),
  ],
)
def test_a_faulty_file_is_named(folder, write, message):
  file = folder / "dog" / "x.png"
  write(file)
  with pytest.raises(tasks.DataError) as error:
    of_folder(folder)
  assert str(error.value).startswith(f"{file}: ")
  assert message.format(cat=folder / "cat" / "0.png") in str(error.value)
  assert "\n" not in str(error.value)


def test_faults_of_a_folder_are_one_line(tmp_path):
  def fault(folder):
    with pytest.raises(tasks.DataError) as error:
      of_folder(folder)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(f"{folder}: ")
    return str(error.value)

  for name in (b"a", b"caf\xe9"):  # Latin-1.
    os.makedirs(os.fsencode(tmp_path / "y") + b"/" + name)
  assert "names of classes in UTF-8" in fault(tmp_path / "y")
  shutil.rmtree(tmp_path / "y")
  assert fault(tmp_path / "x").endswith("no such folder (task.path)")
  assert "at least 2 classes, got none" in fault(tmp_path)
  (tmp_path / "a").mkdir()
  assert "at least 2 classes, got a (task.path)" in fault(tmp_path)
  (tmp_path / "b").mkdir()
  assert "no images (task.path)" in fault(tmp_path)
  for name in ("a/0", "a/1", "b/0"):
    (tmp_path / name).write_bytes(png(picture(1)))
  assert "at least 2 images of class 'b', one to train" in fault(tmp_path)
  assert "to hold out, got 1" in fault(tmp_path)
  (tmp_path / "b" / "0").unlink()
  assert "to hold out, got 0" in fault(tmp_path)


def test_a_run_goes_on_with_the_same_classes_and_shape(folder, tmp_path):
  run = tmp_path / "run"
  of_folder(folder).save(run)
  (folder / "cat").rename(folder / "eel")
  with pytest.raises(tasks.DataError, match=r"labels\.json does not fit"):
    of_folder(folder, workdir=run)
  (folder / "eel").rename(folder / "cat")
  for i, file in enumerate(sorted(folder.glob("*/*.png"))):
    file.write_bytes(png(picture(i)[1:]))
  with pytest.raises(tasks.DataError, match=r"image_shape\.json does not fit"):
    of_folder(folder, workdir=run)


def test_ids_are_names_and_an_image_is_not_typed(folder):
  task = of_folder(folder)
  assert task.labels([1, 0, 0]) == ["dog", "cat", "cat"]
  assert task.decode(np.array([1, 0])) == "dog cat"
  assert task.encode_target("dog") == [1]
  with pytest.raises(ValueError, match="expected a label, one of cat, dog, go"):
    task.encode_target("eel")
  with pytest.raises(ValueError, match="expected an image, got the text"):
    task.encode("cat")
  assert list(task.decode_batches("validation")) == []
  assert task.score([], []) == {}


def test_config_refuses():
  generated_cases.assert_refused(
    ImageConfig,
    *({"source": ""}, {"path": "", "source": "folder"}, {"path": "x"}),
    *({"held_out": x} for x in (0.0, 1.0, math.nan)),
    {"shift": -1},
    # A mirrored digit is none.
    *({"flip": True, "source": x} for x in ("digits", "mnist", "mnist:3.0.1")),
  )


def test_a_shift_stays_in_sight(folder):
  of_folder(folder, shift=4)
  with pytest.raises(ValueError, match=r"^task\.shift: .*6 × 5.*got 5$"):
    of_folder(folder, shift=5)


def test_scikit_learn_is_advised_where_it_is_missing(monkeypatch):
  for name in ("sklearn", "sklearn.datasets"):
    monkeypatch.setitem(sys.modules, name, None)
  with pytest.raises(tasks.DataError, match=r"^task\.source: .*scikit-learn$"):
    make()
