"""Makes tasks, and has a small config of every generated task."""

import functools

import numpy as np

from settings.build import build
import tasks
from tests import refusals
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


_OF_RUN = {"batch_size": 16, "seed": 0, "workdir": None, "restore": False}


def make(name, kind=None, /, **fields):
  """Makes the task of a name for a kind of model."""
  of_run = {key: fields.pop(key, x) for key, x in _OF_RUN.items()}
  if name in CASES:
    served, defaults = CASES[name]
    kind = kind or served
    fields = {"eval_size": EVAL_SIZE, **defaults, **fields}
  entry = tasks.TASKS[name]
  return entry.make(_build(entry.config_type, **fields), kind=kind, **of_run)


def assert_same(a, b):
  """Asserts that two batches are equal."""
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name])


def joined(batches):
  """Rows of several batches of one width, below each other."""
  batches = list(batches)
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def rows(task, batch):
  """Yields (inputs, {position: answer}) of every row, in symbols."""
  read = batch["inputs" if "inputs" in batch else "source"]
  for ids, targets, weights in zip(
    read, batch["targets"], batch["weights"], strict=True
  ):
    symbols = task.labels(ids)
    answers = {int(t): task.labels(targets)[t] for t in weights.nonzero()[0]}
    yield symbols, answers


def assert_refused(config_type, *cases):
  """Asserts that the error of each config names its first field."""
  build_config = functools.partial(_build, config_type)
  refusals.assert_refused(build_config, *cases, prefix="task.")


def _build(config_type, **fields):
  return build(config_type, fields, "task")
