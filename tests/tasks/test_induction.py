"""Induction heads: the answer stands behind the first special symbol."""

import numpy as np
import pytest

from tasks.induction import InductionConfig
from tests.tasks.generated_cases import assert_refused, make, rows


def test_defaults_are_those_of_the_paper():
  """Mamba, section 4.1.2: 16 symbols, and 256 positions in training."""
  config = InductionConfig()
  assert (config.vocab_size, config.length) == (16, 256)


@pytest.mark.parametrize("split", ["validation", "length_6", "length_20"])
def test_the_answer_is_what_followed(split):
  task = make("induction", batch_size=40)
  [batch] = task.eval_batches(split)
  length = {"validation": 12, "length_6": 6, "length_20": 20}[split]
  assert batch["inputs"].shape == (40, length)
  for symbols, answers in rows(task, batch):
    assert symbols.count("=>") == 2
    assert symbols[-1] == "=>"
    assert answers == {length - 1: symbols[symbols.index("=>") + 1]}


def test_the_special_symbol_is_anywhere_and_answers_are_uniform():
  task = make("induction", batch_size=4000, vocab_size=5)
  batch = task.train_batch(0)
  special = task.encode("=>")[0]
  places = (batch["inputs"] == special).argmax(axis=1)
  shares = np.bincount(places, minlength=12) / 4000
  np.testing.assert_allclose(shares[:9], 1 / 9, atol=0.02)
  assert not shares[9:].any()
  counts = np.bincount(batch["targets"][:, -1])[3:] / 4000
  np.testing.assert_allclose(counts, 1 / 4, atol=0.03)


def test_config_refuses():
  assert_refused(
    InductionConfig,
    *({"vocab_size": 2}, {"length": 3}),
    *({"eval_lengths": x} for x in ((3,), (256,), (9, 9))),
    {"eval_size": 0},
  )


def test_the_shortest_sequence():
  task = make("induction", length=4, eval_lengths=())
  for symbols, answers in rows(task, task.train_batch(0)):
    assert symbols[0] == symbols[3] == "=>"
    assert answers == {3: symbols[1]}
