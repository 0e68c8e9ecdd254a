"""Runs that share a program equal runs of their own, and end on their own."""

import json
import types

import jax
import numpy as np
import pytest

from configs import recall
from settings.errors import RunError
from training import experiment, experiment_config, loop, together, workdir
from training.checkpoint import Checkpoints
from training.together import Member

WAYS = {"in_turn": together.in_turn, "side_by_side": together.side_by_side}


def made(folder, seed, rate, **leaves):
  """A small run with warm-up, a schedule and dropout."""
  config = recall.get_config().to_dict()
  config |= {
    "seed": seed,
    "num_steps": 6,
    "batch_size": 8,
    "log_every": 2,
    "eval_every": 3,
    "checkpoint_every": 2,
    **leaves,
  }
  config["task"] |= {
    "vocab_size": 16,
    "length": 8,
    "num_pairs": 2,
    "eval_size": 8,
  }
  config["model"] |= {
    "num_layers": 1,
    "features": 16,
    "mlp_features": 16,
    "dropout_rate": 0.2,
  }
  config["optimizer"] |= {"learning_rate": rate, "warmup_steps": 2}
  parsed = experiment_config.parse(config)
  member = Member(experiment.create(parsed), folder / f"{seed}-{rate}")
  workdir.write_config(member.workdir, parsed)
  return member


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
  monkeypatch.setattr(
    loop.attention_maps, "draw_attention", lambda *unused: None
  )


def state(member):
  """The newest checkpoint of a run."""
  checkpoints = Checkpoints(member.workdir, read_only=True)
  found, _ = checkpoints.restore(member.experiment.shapes)
  checkpoints.close()
  return found


def lines(member):
  """metrics.jsonl without what depends on the clock."""
  found = (member.workdir / "metrics.jsonl").read_text().splitlines()
  clock = ("seconds", "tokens_per_second")
  return [
    {k: v for k, v in json.loads(line).items() if k not in clock}
    for line in found
  ]


def assert_same(member, alone):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    state(member),
    state(alone),
  )
  here, there = lines(member), lines(alone)
  assert len(here) == len(there)
  for line, expected in zip(here, there, strict=True):
    assert line.pop("split") == expected.pop("split")
    assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
  """The same runs, each by itself."""
  folder = tmp_path_factory.mktemp("alone")
  members = [made(folder, 0, 1e-2), made(folder, 1, 3e-3)]
  draw, loop.attention_maps.draw_attention = (
    loop.attention_maps.draw_attention,
    lambda *unused: None,
  )
  for member in members:
    loop.run(member.experiment, member.workdir)
  loop.attention_maps.draw_attention = draw
  return members


@pytest.mark.parametrize("way", WAYS)
def test_runs_equal_those_of_their_own(way, alone, tmp_path):
  members = [made(tmp_path, 0, 1e-2), made(tmp_path, 1, 3e-3)]
  outcomes = list(WAYS[way](members))
  assert [outcome.index for outcome in outcomes] == [0, 1]
  for outcome, member, expected in zip(outcomes, members, alone, strict=False):
    assert outcome.results.keys() == {"validation", "test"}
    assert_same(member, expected)
  # Another seed or another rate would show.
  with pytest.raises(AssertionError):
    assert_same(members[0], alone[1])


@pytest.mark.parametrize("way", WAYS)
def test_one_that_diverges_stops_no_other(way, alone, tmp_path):
  members = [made(tmp_path, 2, 1e38), made(tmp_path, 1, 3e-3)]
  found = {outcome.index: outcome for outcome in WAYS[way](members)}
  assert isinstance(found[0].error, RunError)
  assert "not finite" in str(found[0].error)
  assert found[0].results is None
  assert found[1].results
  assert_same(members[1], alone[1])


def test_stopped_by_one_way_and_continued_by_the_other(alone, tmp_path):
  members = [made(tmp_path, 0, 1e-2), made(tmp_path, 1, 3e-3)]
  stopped = list(together.in_turn(members[:1], stop_at=4))
  assert stopped == [together.Outcome(0, None)]
  # One continues from step 4, and the other begins.
  outcomes = list(together.side_by_side(members))
  assert [outcome.index for outcome in outcomes] == [0, 1]
  assert int(state(members[0]).step) == int(state(members[1]).step) == 6
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5),
    state(members[0]),
    state(alone[0]),
  )
  assert_same(members[1], alone[1])


def test_a_step_of_each_way_is_timed(tmp_path):
  members = [made(tmp_path, 0, 1e-2), made(tmp_path, 1, 3e-3)]
  seconds = together.step_seconds(members)
  assert seconds.keys() == set(WAYS)
  assert all(value > 0 for value in seconds.values())
  # Nothing is trained by it.
  assert not (members[0].workdir / "checkpoints").exists()


def test_batches_of_several_lengths_cannot_be_side_by_side(tmp_path):
  member = made(tmp_path, 0, 1e-2)

  def batch(step):
    return {"inputs": np.zeros((8, 4 + (step == 5)), np.int32)}

  sorted_by_length = member.experiment._replace(
    task=types.SimpleNamespace(train_batch=batch)
  )
  other = made(tmp_path, 1, 1e-2)
  assert together.are_alike([member, other])
  assert not together.are_alike([Member(sorted_by_length, tmp_path)])
