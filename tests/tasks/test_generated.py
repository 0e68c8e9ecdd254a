"""What holds for every task that computes its examples."""

import numpy as np
import pytest

from tests.tasks.generated_cases import (
  CASES,
  EVAL_SIZE,
  assert_same,
  joined,
  make,
)


@pytest.fixture(params=CASES)
def name(request):
  return request.param


def test_an_example_depends_on_its_index_not_on_the_batch_size(name):
  small = make(name, batch_size=4)
  parts = joined(small.train_batch(3 * 2 + i) for i in range(3))
  assert_same(make(name, batch_size=12).train_batch(2), parts)


def test_every_split_has_examples_of_its_own(name):
  task = make(name)
  seen = set()
  for split in task.eval_splits:
    batch = joined(task.eval_batches(split))
    read = batch["inputs" if "inputs" in batch else "source"][:EVAL_SIZE]
    assert not seen & {row.tobytes() for row in read}
    seen |= {row.tobytes() for row in read}
  trained = joined(task.train_batch(step) for step in range(5))
  read = trained["inputs" if "inputs" in trained else "source"]
  assert not seen & {row.tobytes() for row in read}


@pytest.mark.parametrize("name", ["recall", "listops"])
def test_a_training_set_is_trained_in_a_new_order_each_time(name):
  task = make(name, train_size=24, batch_size=8)
  endless = make(name, batch_size=24)
  key = "inputs" if name == "recall" else "source"

  def epoch(i):
    return joined(task.train_batch(3 * i + j) for j in range(3))[key]

  first, second = epoch(0), epoch(1)
  assert not np.array_equal(first, second)
  expected = sorted(row.tobytes() for row in endless.train_batch(0)[key])
  for rows in (first, second):
    assert sorted(row.tobytes() for row in rows) == expected
  # A batch may begin in one round and end in the next.
  whole = make(name, train_size=24, batch_size=36).train_batch(0)[key]
  np.testing.assert_array_equal(whole, np.concatenate([first, second[:12]]))


def test_nothing_is_decoded(name):
  task = make(name)
  assert list(task.decode_batches("validation")) == []
  assert task.score([], []) == {}


def test_a_typed_line_has_the_ids_of_a_batch(name):
  task = make(name)
  batch = task.train_batch(0)
  ids = batch["inputs" if "inputs" in batch else "source"][0]
  ids = ids[ids > 0].tolist()
  line = task.decode(ids).removeprefix("<cls> ")
  assert task.encode(line) == ids
  assert task.decode(task.encode_target(line)) == line


def test_what_cannot_be_read_is_refused(name):
  task = make(name)
  with pytest.raises(ValueError, match=r"^expected symbols .* got 'x'$"):
    task.encode("x")
  with pytest.raises(ValueError, match=r"^expected 1 to \d+ symbols, got 0$"):
    task.encode(" ")
