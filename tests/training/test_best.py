"""The best evaluation: kept, waited for, and counted across a restart."""

import dataclasses
import pathlib
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from comparison import criterion
from settings.errors import ConfigError, RunError
from tests.training.corruption import flip_a_byte
from tests.training.fake_task import FakeTask, emptied, newest, records
from tests.training.tiny import config, make_parts
from training import best as best_lib
from training import checkpoint, experiment
from training.checkpoint import Checkpoints
from training.config import TrainConfig
from training.devices import profile

OFTEN = {"num_steps": 8, "eval_every": 1, "checkpoint_every": 4}


class Valley(FakeTask):
  """Its `valley_loss` is 0 at one loss and grows on both sides of it."""

  def __init__(self, lowest, **faults):
    super().__init__(**faults)
    self.lowest = lowest

  def summarize(self, sums, split=None):
    values = super().summarize(sums, split)
    return values | {"valley_loss": abs(values["loss"] - self.lowest)}


_LOSSES = {}  # After each step, which all tests have in common.


@pytest.fixture
def lowest(run, tmp_path):
  """The held-out loss after three steps."""
  if not _LOSSES:
    run(FakeTask(), **OFTEN)
    _, lines = emptied(tmp_path)
    held_out = [line for line in lines if line["split"] != "train"]
    _LOSSES.update({line["step"]: line["loss"] for line in held_out})
  assert len({*_LOSSES.values()}) == 8
  return _LOSSES[3]


def kept(workdir):
  return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir())


def best(workdir, metric):
  """Step of the checkpoint that is read by default."""
  parts, like = make_parts(dropout=True)
  asked = {"checkpoint_keep": "best", "best_metric": metric, "eval_every": 1}
  keeping = dataclasses.replace(parts.config, **(asked if metric else {}))
  checkpoints = Checkpoints(workdir, keeping, read_only=True)
  state, _ = checkpoints.restore(like, best=True)
  checkpoints.close()
  return int(state.step)


def test_the_best_checkpoint_stays_and_is_what_the_run_ends_with(
  run, lowest, tmp_path
):
  asked = {"checkpoint_keep": "best", "best_metric": "valley_loss", **OFTEN}
  results = run(Valley(lowest), **asked)
  assert results["test"]["checkpoint"] == "of step 3, the best"
  assert results["validation"]["valley_loss"] == 0
  assert records(tmp_path)[-1]["step"] == 8
  # The last one goes on where the run is given more steps.
  assert kept(tmp_path) == [3, 4, 8]
  assert (best(tmp_path, "valley_loss"), best(tmp_path, "")) == (3, 8)
  run(Valley(lowest), **asked | {"num_steps": 9})
  assert kept(tmp_path) == [3, 4, 8, 9]
  assert newest(tmp_path)[0] == 9


def test_another_one_is_not_called_the_best(run, lowest, tmp_path, capfd):
  asked = {"checkpoint_keep": "best", "best_metric": "valley_loss", **OFTEN}
  assert run(Valley(lowest), stop_at=7, **asked) is None
  flip_a_byte(tmp_path, 3)
  results = run(Valley(lowest), **asked)
  assert capfd.readouterr().err.startswith("checkpoint 3 is corrupt")
  told = "of step 8; the best, of step 3, is damaged"
  assert {x["checkpoint"] for x in results.values()} == {told}


def test_a_metric_that_grows_is_best_where_it_is_largest(run, tmp_path):
  task = FakeTask(measured={"bleu": 1.0})
  results = run(task, checkpoint_keep="best", best_metric="bleu", **OFTEN)
  # Equal ones are no gain.
  assert results["validation"]["checkpoint"] == "of step 1, the best"
  assert best(tmp_path, "bleu") == 1


@pytest.mark.parametrize(
  ("parallel", "keep"), [("jit", "newest"), ("pmap", "best")]
)
def test_patience_counts_on_after_a_kill(run, lowest, tmp_path, parallel, keep):
  asked = {
    **{"patience": 3, "best_metric": "valley_loss", "parallel": parallel},
    **{"checkpoint_keep": keep, **OFTEN},
  }
  results = run(Valley(lowest), **asked)
  told = "at step 6: no gain in valley_loss in 3 evaluations"
  assert results["validation"]["stopped"] == told
  assert ("checkpoint" in results["validation"]) == (keep == "best")
  expected, lines = emptied(tmp_path)
  assert expected[0] == 6
  # Of the evaluations that count, those after 3, two come before the stop.
  assert run(Valley(lowest), stop_at=5, **asked) is None
  assert run(Valley(lowest), **asked) == results
  assert (newest(tmp_path), records(tmp_path)) == (expected, lines)
  # It has ended, and is left alone.
  task = Valley(lowest)
  assert run(task, **asked).keys() == results.keys()
  assert task.asked == []


def test_a_threshold_ends_the_run_where_it_is_reached(run, lowest, tmp_path):
  asked = {"best_metric": "valley_loss", **OFTEN}
  results = run(Valley(lowest), stopping_threshold=0.0, **asked)
  told = "at step 3: valley_loss reached stopping_threshold=0"
  assert results["validation"]["stopped"] == told
  assert (newest(tmp_path)[0], max(kept(tmp_path))) == (3, 3)
  # It has ended, and is left alone.
  task = Valley(lowest)
  asked["stopping_threshold"] = 0.0
  assert run(task, **asked)["validation"]["stopped"] == told
  assert task.asked == []
  emptied(tmp_path)
  results = run(Valley(lowest), **asked | {"stopping_threshold": -1.0})
  assert "stopped" not in results["validation"]
  assert newest(tmp_path)[0] == 8


def test_a_higher_metric_reaches_a_threshold_from_below(run, tmp_path):
  asked = {"best_metric": "bleu", "stopping_threshold": 2.0, **OFTEN}
  assert (
    "stopped"
    not in run(FakeTask(measured={"bleu": 1.9}), **asked)["validation"]
  )
  emptied(tmp_path)
  results = run(FakeTask(measured={"bleu": 2.5}), **asked)
  assert results["validation"]["stopped"].startswith("at step 1: bleu reached")


def test_what_stop_at_evaluates_does_not_count(run, lowest, tmp_path):
  asked = {"patience": 1, "best_metric": "valley_loss", **OFTEN}
  asked["eval_every"] = 3
  expected = run(Valley(lowest), **asked)
  emptied(tmp_path)
  assert run(Valley(lowest), stop_at=4, **asked) is None
  assert run(Valley(lowest), **asked) == expected


@pytest.mark.parametrize(
  ("leaves", "message"),
  [
    ({"checkpoint_keep": "best"}, "eval_every: checkpoint_keep='best'"),
    ({"patience": 2}, "expected less than num_steps=8, got 8"),
    ({"stopping_threshold": 0.5}, "expected less than num_steps=8, got 8"),
    ({"best_metric": "bleu"}, "best_metric: expected the default, 'loss'"),
    ({"profile_steps": "5:5"}, "profile_steps: expected FIRST:LAST, such as"),
    ({"profile_steps": "5:9"}, "LAST at most num_steps=8, got '5:9'"),
    ({"profile_steps": "five"}, "got 'five'"),
  ],
)
def test_what_cannot_be_honoured_is_told(leaves, message):
  with pytest.raises(ValueError, match=message):
    TrainConfig(num_steps=8, batch_size=1, eval_every=8, **leaves)


def test_steps_of_a_profile(tmp_path, capsys):
  """Up to the last step; they are told where they are done already."""
  train = TrainConfig(num_steps=8, batch_size=1, profile_steps="0:8")
  assert train.profiled == range(8)
  profile.Profile(range(2, 4), tmp_path, 3)
  assert not capsys.readouterr().out
  profile.Profile(range(2, 4), tmp_path, 4)
  assert capsys.readouterr().out.startswith(
    "profile_steps=2:4: these steps are"
  )


def asking(metric):
  """A run that keeps the best of a metric."""
  task, often = {"name": "recall", "eval_size": 16}, {"eval_every": 3}
  best = {"checkpoint_keep": "best", "best_metric": metric}
  return config("decoder", task, num_steps=9, **often, **best)


def test_a_metric_that_no_evaluation_has_is_told_and_nothing_written(tmp_path):
  asked = asking("bleu")
  with pytest.raises(ConfigError, match=r"one of accuracy, loss, .*'bleu'"):
    experiment.begin(asked, tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("counted_at", [0, 1, None])
def test_a_metric_that_no_example_counts_for_is_refused(
  tmp_path, monkeypatch, counted_at
):
  """Of two held-out batches, the second may be the first that has one."""
  asked = asking("rare")
  task_type = type(experiment.create(asked).task)
  eval_batches, metric_sums = task_type.eval_batches, task_type.metric_sums

  def marked(self, split):
    for number, batch in enumerate(eval_batches(self, split)):
      rows = len(batch["weights"])
      yield {**batch, "rare": np.full(rows, float(number == counted_at))}

  def with_rare(self, logits, batch):
    rare = jnp.stack([jnp.sum(batch["rare"])] * 2)
    return metric_sums(self, logits, batch) | {"rare": rare}

  monkeypatch.setattr(task_type, "eval_batches", marked)
  monkeypatch.setattr(task_type, "metric_sums", with_rare)
  if counted_at is not None:
    experiment.begin(asked, tmp_path / "run")
    return
  with pytest.raises(ConfigError, match=r"one of accuracy, loss, .*'rare'"):
    experiment.begin(asked, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_an_evaluation_without_the_metric_is_explained(run):
  """What a task leaves out may follow from the logits."""
  with pytest.raises(RunError) as info:
    run(FakeTask(), patience=2, best_metric="bleu", **OFTEN)
  assert str(info.value) == (
    "config.best_metric: this evaluation has no 'bleu', because nothing was "
    "counted for it; it has accuracy, loss"
  )


def test_a_profile_is_written(run, tmp_path, capsys):
  run(FakeTask(), profile_steps="2:4", stop_at=5, **OFTEN)
  traces = {path.suffix for path in (tmp_path / "profile").rglob("*.*")}
  assert {".gz", ".pb"} <= traces
  for path in sorted((tmp_path / profile.FOLDER).rglob("*"), reverse=True):
    path.rmdir() if path.is_dir() else path.unlink()
  pathlib.Path(tmp_path / "profile").rmdir()
  capsys.readouterr()
  run(FakeTask(), profile_steps="2:4", **OFTEN)
  told = (
    "profile_steps=2:4: these steps are already done; the run continues from"
  )
  assert told in capsys.readouterr().out
  assert not (tmp_path / "profile").exists()


def test_a_run_with_more_steps_ends_where_one_of_these_steps_does(
  run, lowest, tmp_path
):
  """Patience counts the evaluation at the end of the shorter one."""
  asked = {"patience": 3, "best_metric": "valley_loss", **OFTEN}
  run(Valley(lowest), **asked)
  expected = newest(tmp_path)
  emptied(tmp_path)
  results = run(Valley(lowest), **asked | {"num_steps": 5})
  assert "stopped" not in results["validation"]
  results = run(Valley(lowest), **asked)
  assert results["validation"]["stopped"].startswith("at step 6: ")
  assert newest(tmp_path) == expected


LOWER = (
  *("loss", "error_rate", "perplexity", "bits_per_character", "my_loss"),
  # Of tasks of a user's own.
  *("wer", "valid_cer", "mse", "rmse", "pixel_mae", "nll", "error", "bits"),
  *("edit_distance", "bits_per_byte", "nll_per_token", "cross_entropy", "ppl"),
)
HIGHER = (
  *("accuracy", "token_accuracy", "last_accuracy", "exact_match", "bleu"),
  *(
    "recall",
    "episode_return",
    "lossless",
    "characters",
    "accuracy_per_character",
    "answer",
    "errorless",
  ),
)


@pytest.mark.parametrize(
  ("metric", "better"),
  [*((x, 1.0) for x in LOWER), *((x, 3.0) for x in HIGHER)],
)
def test_which_value_of_a_metric_is_better(metric, better):
  settings = TrainConfig(
    **{"batch_size": 4, "num_steps": 9, "eval_every": 1, "patience": 1},
    best_metric=metric,
  )
  worse = 4.0 - better
  evaluations = best_lib.BestEvaluation(settings, {})
  gains = [
    evaluations.add({metric: value}, counts=True)
    for value in (2.0, better, worse)
  ]
  assert gains == [2.0, better, None]
  # Orbax keeps the same one.
  options = checkpoint._keep_best(metric)
  assert options["best_mode"] == ("min" if metric in LOWER else "max")


def test_every_metric_that_decides_has_a_direction():
  assert {*criterion.HEADLINES} <= {*LOWER, *HIGHER}


def test_a_value_that_is_no_number_is_no_gain():
  settings = TrainConfig(batch_size=4, num_steps=4, eval_every=1, patience=2)
  found = best_lib.BestEvaluation(settings, {})
  gains = [
    found.add({"loss": x}, counts=True) for x in (float("nan"), 2.0, 1.0)
  ]
  assert gains == [None, 2.0, 1.0]
  assert found.end == ""


def test_the_newest_is_read_before_any_evaluation(run, tmp_path):
  asked = {"checkpoint_keep": "best", "num_steps": 8, "eval_every": 7}
  run(FakeTask(), **asked, checkpoint_every=2, stop_at=3)
  for metrics in (tmp_path / "checkpoints").glob("*/metrics"):
    shutil.rmtree(metrics)  # As of a run that was killed between evaluations.
  assert best(tmp_path, "loss") == max(kept(tmp_path))
