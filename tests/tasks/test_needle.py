"""Needle in a haystack: the answer by search, and accuracy by depth."""

import jax.numpy as jnp
import numpy as np
import pytest

from tasks.needle import NeedleConfig
from tests.tasks.generated_cases import assert_refused, make, rows

LENGTHS = {"validation": 33, "test": 33, "length_14": 14, "length_64": 64}


@pytest.mark.parametrize("split", ["train", *LENGTHS])
def test_the_answer_is_the_value_behind_the_key(split):
  task = make("needle", batch_size=40)
  if split == "train":
    batch = task.train_batch(1)
  else:
    [batch] = task.eval_batches(split)
  length = LENGTHS.get(split, 33)
  for symbols, answers in rows(task, batch):
    assert len(symbols) == length
    *haystack, question, key = symbols
    assert question == "?"
    keys = [s for s in haystack if s[0] == "k"]
    assert len(keys) == len(set(keys)) == 4
    assert sum(s[0] == "v" for s in haystack) == 4
    for other in keys:
      assert haystack[haystack.index(other) + 1][0] == "v"
    assert answers == {length - 1: haystack[haystack.index(key) + 1]}


@pytest.mark.parametrize("split", LENGTHS)
def test_depths_are_evaluated_in_turn(split):
  task = make("needle", batch_size=40)
  [batch] = task.eval_batches(split)
  last = (LENGTHS[split] - 2) // 2 - 1
  for index, (symbols, _) in enumerate(rows(task, batch)):
    place = symbols.index(symbols[-1]) // 2
    assert abs(place - index % 5 / 4 * last) <= 0.5


def test_every_place_is_trained():
  batch = make("needle", batch_size=3000).train_batch(0)
  places = (batch["inputs"] == batch["inputs"][:, -1:]).argmax(axis=1)
  assert (places % 2 == 0).all()
  shares = np.bincount(places // 2) / 3000
  np.testing.assert_allclose(shares, 1 / 15, atol=0.02)


@pytest.mark.parametrize("split", LENGTHS)
@pytest.mark.parametrize("num_depths", [2, 3, 5])
def test_accuracy_is_reported_by_depth(split, num_depths):
  task = make("needle", batch_size=50, num_depths=num_depths)
  [batch] = task.eval_batches(split)
  # Wrong at the deepest only; the last rows are padding.
  logits = np.eye(task.target_vocab_size)[batch["targets"]]
  deepest = np.arange(50) % num_depths == num_depths - 1
  logits[deepest] *= -1
  sums = task.metric_sums(jnp.asarray(logits), batch)
  metrics = task.summarize({k: tuple(v) for k, v in sums.items()})
  depths = [round(100 * i / (num_depths - 1)) for i in range(num_depths)]
  names = [f"accuracy_depth_{depth}" for depth in depths]
  assert list(metrics) == ["accuracy", *names]
  assert [metrics[n] for n in names] == [1.0] * (num_depths - 1) + [0.0]
  assert metrics["accuracy"] == pytest.approx(1 - deepest[:40].sum() / 40)


def test_config_refuses():
  assert_refused(
    NeedleConfig,
    *({"num_depths": 1}, {"num_distractors": -1}, {"num_keys": 3}),
    *({"num_values": 1}, {"num_fillers": 0}, {"length": 11}),
    *({"eval_lengths": (8,)}, {"eval_size": 4}),
  )


def test_a_haystack_of_nothing_but_pairs():
  task = make("needle", length=12, num_distractors=4, eval_lengths=())
  for symbols, _ in rows(task, task.train_batch(0)):
    assert [s[0] for s in symbols] == list("kvkvkvkvkv?k")
