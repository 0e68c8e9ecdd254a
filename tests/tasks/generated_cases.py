"""One small config of every generated task, for the tests of all of them."""

import numpy as np
import pytest

from settings.build import build
from settings.errors import ConfigError
import tasks
from tests.here import here

CASES = {
  "recall": ("decoder", {"vocab_size": 40, "length": 30, "num_pairs": 4}),
  "induction": ("decoder", {"length": 12, "eval_lengths": (6, 20)}),
  "selective_copy": (
    "decoder",
    {"length": 20, "num_tokens": 5, "eval_lengths": (8, 30)},
  ),
  "listops": ("encoder", {"min_length": 6, "max_length": 40}),
  "pathfinder": (
    "encoder",
    {"size": 20, "num_dashes": 4, "num_distractors": 1},
  ),
  "needle": ("decoder", {"length": 33, "eval_lengths": (14, 64)}),
  "state_tracking": ("decoder", {"length": 12, "eval_lengths": (5, 20)}),
}
CASES = {name: CASES[name] for name in here(CASES)}
EVAL_SIZE = 40


def make(name, *, batch_size=16, seed=0, kind=None, **fields):
  served, defaults = CASES[name]
  entry = tasks.TASKS[name]
  config = entry.config_type(**{"eval_size": EVAL_SIZE, **defaults, **fields})
  return entry.make(
    config, kind=kind or served, batch_size=batch_size, seed=seed
  )


def assert_same(a, b):
  """Two batches are equal."""
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name])


def joined(batches):
  """Rows of several batches of one width, below each other."""
  batches = list(batches)
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def rows(task, batch):
  """(what is read, {position: answer}) of every row, in symbols."""
  read = batch["inputs" if "inputs" in batch else "source"]
  for ids, targets, weights in zip(
    read, batch["targets"], batch["weights"], strict=True
  ):
    symbols = task.labels(ids)
    answers = {int(t): task.labels(targets)[t] for t in weights.nonzero()[0]}
    yield symbols, answers


def fault(config_type, **fields):
  """The message of a config that is refused."""
  with pytest.raises(ConfigError) as error:
    build(config_type, fields, "task")
  assert "\n" not in str(error.value)
  return str(error.value).removeprefix("task.")
