"""State tracking: each answer is the product of all permutations up to it."""

import itertools

import numpy as np
import pytest

from tasks.state_tracking import StateTrackingConfig
from tests.tasks.generated_cases import assert_refused, make, rows


@pytest.mark.parametrize("letters", [2, 3, 4, 5])
@pytest.mark.parametrize(
  "split", ["validation", "test", "length_5", "length_20"]
)
def test_the_answers_are_what_is_done_to_the_letters(split, letters):
  task = make("state_tracking", letters=letters)
  batch = next(iter(task.eval_batches(split)))
  length = {"validation": 12, "test": 12, "length_5": 5, "length_20": 20}[split]
  assert batch["inputs"].shape == (16, length)
  for symbols, answers in rows(task, batch):
    assert list(answers) == list(range(length))
    places = list(range(1, letters + 1))
    for t, permutation in enumerate(symbols):
      places = [int(permutation[place - 1]) for place in places]
      assert answers[t] == "".join(map(str, places))


def test_every_permutation_is_drawn_alike():
  task = make("state_tracking", batch_size=2000)
  batch = task.train_batch(0)
  elements = ["".join(x) for x in itertools.permutations("123")]
  assert task.labels(range(3, 9)) == elements
  for name in ("inputs", "targets"):
    shares = np.bincount(batch[name].ravel())[3:] / batch[name].size
    np.testing.assert_allclose(shares, 1 / 6, atol=0.01)


@pytest.mark.parametrize("split", ["test", "length_20"])
def test_what_is_lost_half_way_is_not_hidden_by_the_prefixes(split):
  # Right up to half of the length, and the next symbol beyond: 0 of the last
  # positions, where a mean over prefixes says 1 / 2.
  task = make("state_tracking", letters=2)
  totals = {}
  for batch in task.eval_batches(split):
    half = np.arange(batch["targets"].shape[1]) >= batch["targets"].shape[1] / 2
    answers = np.where(half, 7 - batch["targets"], batch["targets"])
    answers[:2] = batch["targets"][:2]
    logits = np.eye(8, dtype=np.float32)[answers]
    for name, pair in task.metric_sums(logits, batch).items():
      totals[name] = totals.get(name, 0) + np.asarray(pair)
  count = totals["last_accuracy"][1]
  assert count == totals["sequence_accuracy"][1]
  whole = totals["last_accuracy"][0]
  values = task.summarize(totals)
  assert values == {
    "accuracy": pytest.approx((1 + whole / count) / 2),
    "sequence_accuracy": pytest.approx(whole / count),
    "last_accuracy": pytest.approx(whole / count),
  }
  assert 0 < whole / count < 1


def test_config_refuses():
  assert_refused(
    StateTrackingConfig,
    *({"letters": 1}, {"letters": 6}, {"length": 0}, {"eval_lengths": (32,)}),
    {"eval_size": 0},
  )
