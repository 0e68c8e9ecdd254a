"""Associative recall: the answers by a dictionary, and the law of the gaps."""

import numpy as np
import pytest

from tasks.recall import RecallConfig
from tests.tasks.generated_cases import assert_refused, make, rows


@pytest.mark.parametrize("random_filler", [False, True])
def test_every_key_is_asked_for_once_and_answered_by_its_value(random_filler):
  task = make("recall", random_filler=random_filler)
  for step in range(4):
    for symbols, answers in rows(task, task.train_batch(step)):
      pairs = dict(zip(symbols[0:8:2], symbols[1:8:2], strict=True))
      assert len(pairs) == len(set(pairs.values())) == 4
      assert {key[0] for key in pairs} == {"k"}
      assert {value[0] for value in pairs.values()} == {"v"}
      assert {symbols[t] for t in answers} == set(pairs)
      for t, answer in answers.items():
        assert t >= 8
        assert pairs[symbols[t]] == answer
      filler = set(symbols[8:]) - set(pairs)
      assert len(filler) > 4 if random_filler else filler == {"."}


def test_symbols_are_those_of_the_paper():
  task = make("recall", vocab_size=8192)
  assert task.target_vocab_size == 8192 + 3
  assert task.labels([3, 4, 4098, 4099]) == [".", "k1", "k4095", "v4096"]


def test_gaps_follow_the_power_law():
  task = make("recall", power=0.01, batch_size=4000)
  batch = task.train_batch(0)
  first_keys = batch["inputs"][:, :1]
  later = batch["inputs"][:, 8:] == first_keys
  gaps = later.argmax(axis=1)
  assert (gaps % 2 == 0).all()
  # The first pair's question is drawn first, so from the law itself.
  law = np.arange(1.0, 12) ** -0.99
  shares = np.bincount(gaps // 2, minlength=11) / 4000
  np.testing.assert_allclose(shares, law / law.sum(), atol=0.025)
  # A power of one is uniform.
  batch = make("recall", power=1, batch_size=4000).train_batch(0)
  shares = batch["weights"][:, 8:].mean(axis=0)
  np.testing.assert_allclose(shares[::2], 4 / 11, atol=0.03)
  assert not shares[1::2].any()


def test_numbers_of_pairs_come_as_often_and_have_splits_of_their_own():
  numbers = {"num_pairs": 5, "fewer_pairs": (1, 3), "length": 24}
  task = make("recall", batch_size=3000, **numbers)
  splits = "validation", "test", "pairs_1", "pairs_3", "pairs_5"
  assert task.eval_splits == splits
  counts = task.train_batch(0)["weights"].sum(axis=1).astype(int)
  shares = np.bincount(counts, minlength=6) / 3000
  np.testing.assert_allclose(3 * shares, [0, 1, 0, 1, 0, 1], atol=0.12)
  for pairs in (1, 3, 5):
    (batch,) = task.eval_batches(f"pairs_{pairs}")
    for symbols, answers in rows(task, batch):
      if not answers:  # Fills the batch.
        continue
      shown = symbols[: 2 * pairs]
      known = dict(zip(shown[::2], shown[1::2], strict=True))
      assert len(known) == len(answers) == pairs
      assert min(answers) >= 2 * pairs
      assert all(known[symbols[t]] == x for t, x in answers.items())


def test_config_refuses():
  assert_refused(
    RecallConfig,
    *({"num_pairs": 0}, {"vocab_size": 9}, {"length": 15}),
    *({"fewer_pairs": (4,)}, {"fewer_pairs": (3, 2)}, {"power": 0.0}),
    *({"train_size": -1}, {"eval_size": 0}),
  )


def test_the_smallest_config_works():
  batch = make("recall", vocab_size=10, length=16).train_batch(0)
  assert batch["inputs"].shape[1] == 16
  assert (batch["weights"].sum(axis=1) > 0).all()
