"""Selective copying: what is left when the noise is struck out."""

import numpy as np
import pytest

from tasks.selective_copy import SelectiveCopyConfig
from tests.tasks.generated_cases import assert_refused, make, rows

PLACES = {"validation": 20, "test": 20, "length_8": 8, "length_30": 30}


def check_answers(task, batch, places):
  for symbols, answers in rows(task, batch):
    assert symbols[places:] == ["|"] * 5
    kept = [s for s in symbols[:places] if s != "."]
    assert len(kept) == 5
    assert "|" not in kept
    assert answers == dict(enumerate(kept, start=places))


@pytest.mark.parametrize("split", PLACES)
def test_a_split_of_another_length_has_as_many_symbols(split):
  task = make("selective_copy", batch_size=40)
  [batch] = task.eval_batches(split)
  assert batch["inputs"].shape == (40, PLACES[split] + 5)
  check_answers(task, batch, PLACES[split])
  check_answers(task, task.train_batch(0), 20)


def test_a_seed_keeps_its_examples():
  task = make("selective_copy")
  held_out = next(task.eval_batches("validation"))
  for batch, symbols in (
    (task.train_batch(0), ". . . . 4 . 12 . . 4 . 6 . . . 3 . . . ."),
    (held_out, "11 . . . . 10 . . . 13 . . . . 4 . . . . 3"),
  ):
    assert task.decode(batch["inputs"][0]) == symbols + " |" * 5


def test_places_and_symbols_are_uniform():
  task = make("selective_copy", batch_size=2000, vocab_size=6)
  inputs = task.train_batch(0)["inputs"][:, :20] - 3
  np.testing.assert_allclose((inputs > 0).mean(axis=0), 1 / 4, atol=0.04)
  counts = np.bincount(inputs[inputs > 0])[1:] / (5 * 2000)
  np.testing.assert_allclose(counts, 1 / 4, atol=0.02)


def test_nothing_but_symbols():
  task = make("selective_copy", length=5)
  for symbols, answers in rows(task, task.train_batch(0)):
    assert list(answers.values()) == symbols[:5]


def test_config_refuses():
  assert_refused(
    SelectiveCopyConfig,
    *({"vocab_size": 3}, {"num_tokens": 0}, {"length": 15}),
    *({"eval_lengths": x} for x in ((15,), (0,), (4096,), (99, 99))),
    {"eval_size": 0},
  )
