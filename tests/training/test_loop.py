"""The story of a run, on a task and a model that do nothing but obey."""

import json
import math
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from settings.errors import RunError
from tests.training.fake_task import FakeTask, emptied, newest, records
from tests.training.tiny import CLASSES, make_batch, make_parts
from training import evaluate, loop, loss_meter, metrics, signals, step
from training.config import OptimizerConfig
from training.loss_meter import LossMeter


class Translation(FakeTask):
  """Two sentences a split, whose lengths are what the score is made of."""

  def decode_batches(self, split):
    inputs = {"source": np.ones((2, 3), np.int32)}
    yield types.SimpleNamespace(
      inputs=inputs, references=[split, "b"], max_length=3
    )

  def score(self, hypotheses, references):
    return {"bleu": 0.0}

  def sentence_statistics(self, hypotheses, references):
    pairs = zip(hypotheses, references, strict=True)
    return [[len(h.split()), len(r)] for h, r in pairs]


def test_a_run_that_another_process_has_ended_is_left_alone(run, tmp_path):
  results, lines = run(FakeTask()), records(tmp_path)
  task = FakeTask()
  again = run(task)
  assert again.keys() == results.keys()
  assert (task.asked, records(tmp_path)) == ([], lines)


def test_a_run_writes_its_story(run, tmp_path, capsys):
  results = run(FakeTask())
  assert list(results) == ["validation", "test"]
  names = {"loss", "accuracy", "exact_match", "signature"}
  assert results["test"].keys() == names
  lines = [(record["step"], record["split"]) for record in records(tmp_path)]
  assert lines == [
    *[(2, "train"), (3, "validation"), (4, "train"), (6, "train")],
    *[(6, "validation"), (7, "train"), (7, "validation"), (7, "test")],
  ]
  assert records(tmp_path)[-1] == {"step": 7, "split": "test"} | results["test"]
  seconds = [record["seconds"] for record in metrics.read(tmp_path)]
  assert seconds == sorted(seconds)
  assert seconds[-1] > 0
  steps = {int(p.name) for p in (tmp_path / "checkpoints").iterdir()}
  assert steps == {3, 6, 7}
  assert "reference  a" in (tmp_path / "samples.txt").read_text()
  assert not (tmp_path / evaluate.SENTENCES).exists()
  assert "step 6/7" in capsys.readouterr().out


def test_every_number_of_a_line_is_that_of_its_steps(run, tmp_path):
  """Loss, gradient norm and learning rate of SGD by hand."""
  typed = {"name": "sgd", "learning_rate": 0.5, "warmup_steps": 3}
  typed |= {"schedule": "inverse_sqrt", "clip_norm": 0.01}
  run(FakeTask(), optimizer=OptimizerConfig(**typed))
  lines = {
    line["step"]: line for line in records(tmp_path) if line["split"] == "train"
  }
  assert sorted(lines) == [2, 4, 6, 7]
  # Quarters of the peak, and from step 3 on √(3 / step) of it.
  rates = [0.125, 0.25, 0.375, *(0.5 * (3 / i) ** 0.5 for i in (3, 4, 5, 6))]
  parts, state = make_parts(dropout=True, **typed)
  objective = step.make_objective(*parts, parts.on().mesh)
  pairs = []
  for index, rate in enumerate(rates):
    key = jax.random.fold_in(jax.random.key(1), index)
    gradient, pair, _ = step.mean_gradient(
      objective, state.params, state.collections, make_batch(index), key
    )
    norm = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in gradient.values()))
    scale = rate * min(1.0, 0.01 / norm)
    params = {
      name: x - scale * gradient[name] for name, x in state.params.items()
    }
    state = state._replace(params=params)
    pairs.append(np.float64(pair))
    if (line := lines.get(index + 1)) is None:
      continue
    total, count = np.sum(pairs, axis=0)
    numbers = {"loss": total / count, "grad_norm": norm, "learning_rate": rate}
    assert norm > 0.01  # What is recorded is before clipping.
    assert {name: line[name] for name in numbers} == pytest.approx(
      numbers, rel=1e-5
    )
    assert line.keys() == {"step", "split", *numbers}
    pairs = []


def test_the_schedule_is_recorded_by_pmap_too(run, tmp_path):
  asked = {"learning_rate": 0.5, "warmup_steps": 4}
  run(FakeTask(), parallel="pmap", optimizer=OptimizerConfig(**asked))
  rates = {
    line["step"]: line["learning_rate"]
    for line in records(tmp_path)
    if line["split"] == "train"
  }
  # Of the last step before a line, steps counted from 0.
  assert rates == pytest.approx({2: 0.2, 4: 0.4, 6: 0.5, 7: 0.5})


def test_seconds_and_tokens_of_training_alone(tmp_path, monkeypatch):
  """By hand: two steps of 3 s with 20 and 30 tokens, between waits of 100 s."""
  clock = types.SimpleNamespace(now=0.0)
  monkeypatch.setattr(loss_meter.time, "monotonic", lambda: clock.now)
  meter = LossMeter((0.0, 0.0), 50.0, tmp_path)

  def take(number, seconds, total, count):
    clock.now += seconds
    metrics = {
      **{"loss": np.array([total, count]), "updates": number + 1},
      **{"grad_norm": 0.5 + number, "learning_rate": 0.1 * (number + 1)},
    }
    meter.add(number, metrics)
    meter.fetch()

  take(0, 1000.0, 70.0, 10.0)
  meter.discard_first_step()  # It compiled.
  take(1, 3.0, 100.0, 20.0)
  clock.now += 100.0
  meter.skip_clock()  # An evaluation.
  take(2, 3.0, 60.0, 30.0)
  assert meter.sums == (230.0, 60.0)
  numbers = {"loss": 230 / 60, "grad_norm": 2.5, "learning_rate": 0.3}
  numbers["tokens_per_second"] = 50 / 6
  assert meter.flush() == pytest.approx(numbers)
  assert (meter.sums, meter.seconds) == ((0.0, 0.0), 56.0)
  take(3, 2.0, 12.0, 4.0)
  numbers = {"loss": 3.0, "grad_norm": 3.5, "learning_rate": 0.4}
  assert meter.flush() == pytest.approx(numbers | {"tokens_per_second": 2.0})


@pytest.mark.parametrize(
  ("sums", "norm", "what", "numbers"),
  [
    ((6, 2), 4.0, "the update makes a", "loss 3.0, gradient norm 4.0, learn"),
    ((6, 2), math.inf, "loss or gradient", "loss 3.0, gradient norm inf)"),
    ((math.nan, 2), 4.0, "loss or gradient", "loss nan, gradient norm 4.0)"),
    ((0, 0), math.nan, "loss or gradient", "loss 0.0, gradient norm nan)"),
  ],
)
def test_a_refused_update_says_why(tmp_path, sums, norm, what, numbers):
  meter = LossMeter((0.0, 0.0), 0.0, tmp_path)
  values = {"loss": np.array(sums), "grad_norm": norm, "learning_rate": 0.5}
  meter.add(4, {**values, "updates": 4})
  with pytest.raises(RunError) as info:
    meter.fetch()
  assert str(info.value).startswith(f"step 5: {what}")
  assert f" ({numbers}" in str(info.value)


def test_a_line_of_one_step_without_targets_or_time(tmp_path):
  meter = LossMeter((0.0, 0.0), 0.0, tmp_path)
  values = {"grad_norm": 0.0, "learning_rate": 0.5}
  meter.add(0, {"loss": np.zeros(2), "updates": 1, **values})
  meter.fetch()
  meter.discard_first_step()
  assert meter.flush() == {"loss": 0.0, **values}


def test_the_host_is_four_steps_ahead_at_most(tmp_path, monkeypatch):
  waited = []
  monkeypatch.setattr(loss_meter.jax, "block_until_ready", waited.append)
  meter = LossMeter((0.0, 0.0), 0.0, tmp_path)
  for number in range(7):
    meter.add(number, {"updates": number + 1})
    assert len(waited) == max(0, number - 3)
  assert [x["updates"] for x in waited] == [1, 2, 3]


def test_samples_of_an_earlier_split_stay(run, tmp_path):
  """A split of another length may have nothing to decode."""

  class DecodesFirst(FakeTask):
    def decode_batches(self, split):
      return super().decode_batches(split) if split == "validation" else ()

  results = run(DecodesFirst())
  assert "exact_match" in results["validation"]
  assert "exact_match" not in results["test"]
  assert "reference  a" in (tmp_path / "samples.txt").read_text()


def test_what_sentences_are_scored_by_is_kept_of_the_last_split(run, tmp_path):
  assert run(Translation(), stop_at=3) is None
  assert not (tmp_path / evaluate.SENTENCES).exists()
  assert run(Translation()) is not None
  found = json.loads((tmp_path / evaluate.SENTENCES).read_text())
  assert found == {"statistics": [[3, len("test")], [3, 1]]}


# Kinds of steps, and of states: a mean of parameters, parameters at two points.
@pytest.mark.parametrize(
  ("parallel", "options"),
  [
    ("jit", {}),
    ("jit", {"ema_decay": 0.75}),
    ("pmap", {"ema_decay": 0.75}),
    ("jit", {"name": "schedule_free_adamw", "learning_rate": 0.05}),
  ],
)
def test_stopped_and_continued_equals_uninterrupted(
  run, tmp_path, parallel, options
):
  asked = {"parallel": parallel, "optimizer": OptimizerConfig(**options)}
  results = run(FakeTask(), **asked)
  expected, lines = emptied(tmp_path, **options)
  assert ("['ema']['kernel']" in expected[1]) == ("ema_decay" in options)
  handler = signal.getsignal(signal.SIGTERM)
  assert run(FakeTask(stop=4), **asked) is None
  assert signal.getsignal(signal.SIGTERM) is handler
  stopped = metrics.read(tmp_path)[-1]
  assert stopped["step"] < 7
  again = FakeTask()
  assert run(again, **asked) == results
  assert min(again.asked) >= 2
  assert newest(tmp_path, **options) == expected
  assert records(tmp_path) == lines
  assert metrics.read(tmp_path)[-1]["seconds"] > stopped["seconds"]


def test_a_notebook_outlives_a_signal_before_the_first_step(
  run, tmp_path, monkeypatch
):
  """It comes while the first step is compiled, and the run ends after that step."""
  ended = []
  monkeypatch.setattr(signals.os, "_exit", ended.append)
  assert run(FakeTask(stop=0)) is None
  assert not ended
  step_of_checkpoint, _ = newest(tmp_path)
  assert 1 <= step_of_checkpoint < 7


def test_what_is_said_of_a_run_that_is_stopped_before_a_step(run, tmp_path):
  """Of one that goes on, where it does."""
  assert loop.before_first_step(tmp_path) == "stopped before the first step"
  assert run(FakeTask(), stop_at=3) is None
  told = "stopped and saved at step 3; run it again to continue"
  assert loop.before_first_step(tmp_path) == told


def test_stopped_at_a_step_and_continued_equals_uninterrupted(run, tmp_path):
  run(FakeTask())
  expected, lines = emptied(tmp_path)
  assert run(FakeTask(), stop_at=5) is None
  assert records(tmp_path)[-1]["split"] == "validation"
  assert newest(tmp_path)[0] == records(tmp_path)[-1]["step"] == 5
  # It is there already.
  assert run(FakeTask(), stop_at=5) is None
  assert run(FakeTask(), stop_at=4) is None
  assert newest(tmp_path)[0] == 5
  # The last step and those after it are the end of the run.
  assert run(FakeTask(), stop_at=7) is not None
  assert newest(tmp_path) == expected
  there = records(tmp_path)
  [added] = [line for line in there if line not in lines]
  assert (added["step"], added["split"]) == (5, "validation")
  assert [line for line in there if line in lines] == lines


def test_a_bad_step_is_named_and_never_saved(run, tmp_path):
  with pytest.raises(RunError) as info:
    run(FakeTask(infinite=4))
  message = str(info.value)
  assert message.startswith("step 5: loss or gradient is not finite")
  assert str(tmp_path / "config.json") in message
  assert "\n" not in message
  assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"3"}


def exploding(learning_rate):
  """An optimiser whose third update overflows, whatever the gradient is."""

  def rate(count):
    return jnp.where(count < 2, learning_rate(count), 3e38)

  return optax.chain(optax.scale(1e5), optax.sgd(rate))


@pytest.mark.parametrize("parallel", ["jit", "pmap"])
def test_an_update_that_overflows_is_named_and_never_saved(
  run, tmp_path, parallel
):
  optimizer = OptimizerConfig(name=f"{__name__}:exploding", learning_rate=1e-8)
  asked = {"checkpoint_every": 1, "parallel": parallel, "optimizer": optimizer}
  with pytest.raises(RunError) as info:
    run(FakeTask(), **asked)
  assert info.match(
    r"^step 3: the update makes a parameter infinite or NaN \(loss \d\.\d+, "
    r"gradient norm \d\.\d+, learning rate 9\.99\S+e-09\); nothing was updated; "
    rf"config: {tmp_path / 'config.json'}$"
  )
  steps = {int(p.name) for p in (tmp_path / "checkpoints").iterdir()}
  assert steps == {1, 2}
  assert records(tmp_path)[-1]["step"] == 2


# The tiny model is at a loss of 2 to 3; that of guessing is log(classes).
@pytest.mark.parametrize(
  ("loss", "classes"),
  [
    (math.nan, CLASSES),
    (140.0, 10**6),  # Ten times log(10⁶) are 138.
  ],
)
def test_an_evaluation_that_cannot_be_right_stops_the_run(
  run, tmp_path, loss, classes
):
  with pytest.raises(RunError) as info:
    run(FakeTask(measured={"loss": loss}, classes=classes), num_steps=5)
  message = str(info.value)
  assert message.startswith(f"step 3: held-out loss is {loss:.4g}, but the")
  assert "the compiled evaluation is wrong" in message
  assert str(tmp_path / "config.json") in message
  assert "\n" not in message
  assert "validation" not in {line["split"] for line in records(tmp_path)}
  # At the end of a run too, whose last step is saved.
  task = FakeTask(measured={"loss": loss}, classes=classes)
  with pytest.raises(RunError, match=r"^step 5: held-out loss is "):
    run(task, num_steps=5, eval_every=100)
  assert newest(tmp_path)[0] == 5
  assert run(FakeTask(), num_steps=5)["validation"]["loss"] < 10


def test_a_loss_is_a_mean_over_weights_that_sum_to_less_than_1(tmp_path):
  """By hand: (0.5 · 3 + 0.125 · 7) / 0.625."""
  meter = LossMeter((0.0, 0.0), 0.0, tmp_path)
  for number, (weight, nats) in enumerate([(0.5, 3.0), (0.125, 7.0)]):
    sums = np.array([weight * nats, weight])
    metrics = {"loss": sums, "updates": number + 1, "grad_norm": 1.0}
    meter.add(number, metrics | {"learning_rate": 0.1})
  meter.fetch()
  assert meter.flush()["loss"] == pytest.approx(3.8)


def test_a_model_that_overfits_goes_on(tmp_path):
  """With two labels ten times guessing is 6.9 nats, which such a model passes."""
  meter = LossMeter((0.1, 1.0), 0.0, tmp_path)
  meter.check_held_out(1000, 7.74, math.log(2))
  meter.check_held_out(1000, 49.0, math.log(2))
  with pytest.raises(RunError, match=r"is 51, but .* loss is 0\.1; the"):
    meter.check_held_out(9, 51.0, math.log(2))


class OfItsOwnLoss(FakeTask):
  """In nats of something else than a class."""

  loss = staticmethod(step.cross_entropy)


@pytest.mark.parametrize(
  ("task", "loss", "classes"),
  [
    (FakeTask, 130.0, 10**6),
    # Nothing is learned yet: training is beyond guessing too.
    (FakeTask, 3e32, 2),
    (OfItsOwnLoss, 3e32, 10**6),
  ],
)
def test_an_evaluation_that_may_be_right_stops_nothing(
  run, task, loss, classes
):
  results = run(task(measured={"loss": loss}, classes=classes))
  assert results["validation"]["loss"] == loss


def test_a_split_of_other_lengths_may_have_any_loss(run):
  class Longer(FakeTask):
    def summarize(self, sums, split=None):
      values = super().summarize(sums, split)
      return values | ({"loss": 3e32} if split == "test" else {})

  assert run(Longer(classes=10**6))["test"]["loss"] == 3e32


def test_unreadable_data_stop_the_run_with_its_checkpoint(run, tmp_path):
  with pytest.raises(RunError) as info:
    run(FakeTask(unreadable=5))
  told = "step 6: data cannot be read: hash mismatch in shard 3"
  assert str(info.value) == told
  assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"3"}
  with pytest.raises(RunError, match=r"split 'validation': .* disk gone"):
    run(FakeTask(evaluation=True))


def test_more_steps_continue_a_finished_run(run, tmp_path):
  """As if all steps had been asked for at first, and nothing is forgotten."""
  run(FakeTask(), num_steps=2)
  first = records(tmp_path)
  assert newest(tmp_path)[0] == 2
  task = FakeTask()
  results = run(task, num_steps=4)
  assert sorted(set(task.asked)) == [2, 3]
  longer = newest(tmp_path)
  assert records(tmp_path)[: len(first)] == first
  assert [r for r in records(tmp_path) if r["step"] == 4][1:] == [
    {"step": 4, "split": split, **values} for split, values in results.items()
  ]
  for path in (tmp_path / "checkpoints", tmp_path / metrics.FILE):
    path.rename(path.with_name(f"before-{path.name}"))
  run(FakeTask(), num_steps=4)
  assert newest(tmp_path) == longer
