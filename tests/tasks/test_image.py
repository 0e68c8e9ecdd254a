"""Classification of images: sources, splits, batches, what is varied."""

import numpy as np
import pytest

import tasks
from tasks import ImageConfig
from tasks.image import sources


def make(batch_size=32, seed=0, workdir=None, restore=False, **leaves):
  return tasks.TASKS["image"].make(
    ImageConfig(**leaves),
    kind="encoder",
    batch_size=batch_size,
    seed=seed,
    workdir=workdir,
    restore=restore,
  )


def assert_same(first, second):
  assert first.keys() == second.keys()
  for name, array in first.items():
    np.testing.assert_array_equal(array, second[name])


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
  assert task.source_vocab_size is task.max_source_length is None
  assert (task.max_target_length, task.shared_vocabulary) == (1, False)
  assert (task.pad_id, task.bos_id, task.eos_id) == (0, 1, 2)
  batch = task.train_batch(0)
  assert batch["image"].shape == (32, 8, 8, 1)
  assert batch["targets"].shape == batch["weights"].shape == (32, 1)
  assert batch["image"].dtype == batch["weights"].dtype == np.float32
  assert batch["targets"].dtype == np.int32
  assert (batch["weights"] == 1).all()
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


def test_a_batch_is_pure_and_a_run_restarts_at_any_step():
  task = make(shift=2)
  batches = [task.train_batch(step) for step in range(60)]
  for step in (59, 45, 44, 7, 0):
    assert_same(make(shift=2).train_batch(step), batches[step])
  other = make(shift=2, seed=1).train_batch(7)
  assert not np.array_equal(other["image"], batches[7]["image"])
  assert not np.array_equal(other["targets"], batches[7]["targets"])


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
  with pytest.raises(KeyError):
    list(task.eval_batches("train"))


def test_the_last_batch_is_padded():
  batches = list(make(batch_size=100).eval_batches("validation"))
  assert [len(batch["image"]) for batch in batches] == [100] * 4
  assert [batch["weights"].sum() for batch in batches] == [100, 100, 100, 59]
  assert not batches[-1]["weights"][59:].any()


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.999])
def test_of_every_class_an_image_is_trained_and_one_is_held_out(share):
  labels = np.repeat([4, 0, 7], [2, 3, 97])
  chosen = sources.held_out_places(labels, share)
  for label, total in ((4, 2), (0, 3), (7, 97)):
    count = chosen[labels == label].sum()
    assert count == np.clip(round(share * total), 1, total - 1)
