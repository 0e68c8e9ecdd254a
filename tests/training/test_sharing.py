"""Runs that differ in seed and learning rate share a program, and nothing else."""

import json

import chex
import pytest

from settings.errors import RunError
from tests.training.tiny import config
from training import experiment, loop, workdir
from training.checkpoint import Checkpoints
from training.devices import parallel


def made(folder, seed, rate, first=None):
  """A small run with warm-up, a schedule and dropout, and its folder."""
  task = {"name": "recall", "vocab_size": 16, "length": 8, "num_pairs": 2}
  parsed = config(
    "decoder",
    task | {"eval_size": 8},
    {"dropout_rate": 0.2},
    **{"seed": seed, "num_steps": 6, "log_every": 2, "eval_every": 3},
    checkpoint_every=2,
    optimizer={"learning_rate": rate, "warmup_steps": 2},
  )
  run = experiment.create(parsed)
  folder = folder / f"{seed}-{rate}"
  workdir.write_config(folder, parsed)
  return run if first is None else experiment.sharing(run, first), folder


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
  monkeypatch.setattr(
    loop.attention_maps, "draw_attention", lambda *unused: None
  )


@pytest.fixture
def traces(monkeypatch):
  """Steps that were traced: one for each program."""
  found, train_step = [], parallel.step_lib.train_step

  def traced(functions, *arguments, **options):
    found.append(functions)
    return train_step(functions, *arguments, **options)

  monkeypatch.setattr(parallel.step_lib, "train_step", traced)
  return found


def left(run, folder):
  """The newest checkpoint, and metrics.jsonl without what the clock decides."""
  checkpoints = Checkpoints(folder, read_only=True)
  state, _ = checkpoints.restore(run.shapes)
  checkpoints.close()
  clock = ("seconds", "tokens_per_second")
  lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
  return state, [
    {k: v for k, v in line.items() if k not in clock} for line in lines
  ]


def assert_same(one, other):
  (state, lines), (expected, others) = one, other
  chex.assert_trees_all_equal(state, expected)
  assert lines == others


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """A run of its own, and what it leaves."""
  run, folder = made(tmp_path_factory.mktemp("alone"), 1, 3e-3)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.attention_maps, "draw_attention", lambda *unused: None)
    assert loop.run(run, folder)
  return run, left(run, folder)


def test_one_program_and_every_bit_of_runs_of_their_own(
  tmp_path, traces, alone
):
  first, folder = made(tmp_path, 0, 1e-2)
  assert loop.run(first, folder)
  before = left(first, folder)
  second, folder = made(tmp_path, 1, 3e-3, first)
  assert loop.run(second, folder)
  assert_same(left(second, folder), alone[1])
  assert len(traces) == 1
  # Another seed or another rate would show.
  with pytest.raises(AssertionError):
    assert_same(before, alone[1])


def test_one_that_diverges_stops_no_other(tmp_path, traces, alone):
  run, expected = alone
  bad, folder = made(tmp_path, 2, 1e38)
  with pytest.raises(RunError, match="not finite"):
    loop.run(bad, folder)
  good, folder = made(tmp_path, 1, 3e-3, bad)
  assert loop.run(good, folder, stop_at=4) is None
  assert len(traces) == 1
  # Continued by a program of its own.
  assert loop.run(run, folder)
  state, lines = left(good, folder)
  lines = [line for line in lines if line in expected[1]]
  assert_same((state, lines), expected)
