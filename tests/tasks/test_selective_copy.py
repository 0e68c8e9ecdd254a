"""Selective copying: what is left when the noise is struck out."""

import numpy as np
import pytest

from tasks import SelectiveCopyConfig
from tests.tasks.generated_cases import fault, make, rows


def test_the_answers_are_the_input_without_noise():
  task = make("selective_copy")
  for step in range(4):
    for symbols, answers in rows(task, task.train_batch(step)):
      assert symbols[20:] == ["|"] * 5
      kept = [s for s in symbols[:20] if s != "."]
      assert len(kept) == 5
      assert "|" not in kept
      assert answers == dict(enumerate(kept, start=20))


def test_places_and_symbols_are_uniform():
  task = make("selective_copy", batch_size=2000, vocab_size=6)
  inputs = task.train_batch(0)["inputs"][:, :20] - 3
  np.testing.assert_allclose((inputs > 0).mean(axis=0), 1 / 4, atol=0.04)
  counts = np.bincount(inputs[inputs > 0])[1:] / (5 * 2000)
  np.testing.assert_allclose(counts, 1 / 4, atol=0.02)


def test_the_paper_s_sequence():
  task = make("selective_copy", length=4096, num_tokens=16, batch_size=2)
  assert task.train_batch(0)["inputs"].shape == (2, 4112)
  assert task.target_vocab_size == 16 + 3


def test_nothing_but_symbols():
  task = make("selective_copy", length=5)
  for symbols, answers in rows(task, task.train_batch(0)):
    assert list(answers.values()) == symbols[:5]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"vocab_size": 3}, "vocab_size: expected at least 4 symbols, got 3"),
    ({"num_tokens": 0}, "num_tokens: expected at least 1, got 0"),
    ({"length": 15}, "length: expected at least num_tokens=16, got 15"),
    ({"eval_size": 0}, "eval_size: expected at least 1, got 0"),
  ],
)
def test_config_refuses(fields, message):
  assert fault(SelectiveCopyConfig, **fields).startswith(message)
