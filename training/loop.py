"""The loop of a run: it restores, trains, evaluates, saves and reports."""

from collections.abc import Callable, Generator
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import pathlib
import signal
from typing import Any, TypeVar

import jax

from settings.errors import ConfigError, RunError, one_line
from training import evaluate, ownership
from training.best import BestEvaluation
from training.checkpoint import Checkpoints, newest_step
from training.devices import cluster, parallel
from training.devices.profile import Profile
from training.experiment import Experiment
from training.loss_meter import LossMeter
from training.metrics import MetricsWriter, Progress, format_values
from training.pictures import attention_maps
from training.signals import Interrupted, Signals
from training.state import TrainState
from training.step import make_eval_step, make_step
from training.workdir import STOPPED, final_metrics

T = TypeVar("T")

Results = dict[str, dict[str, Any]]
"""Maps splits to metric names to values."""


def run(
  experiment: Experiment,
  workdir: pathlib.Path,
  stop_at: int | None = None,
  *,
  ends_process: bool = False,
) -> Results | None:
  """Trains to the end, from the newest checkpoint if there is one.

  A run that is killed and started again ends bit-identical to an uninterrupted run:
  batches and dropout depend only on the step, and the state is restored from the
  checkpoint.

  Args:
    experiment: the run to train.
    workdir: folder for all outputs, which already has the config.
    stop_at: number of updates after which to evaluate the first held-out split,
      save and return; None trains to the end. In both cases, the schedule is that of
      the whole run.
    ends_process: whether a signal before the first new step ends the process
      immediately, even while XLA compiles. False, as in a notebook, keeps the process
      and ends the run after that step.

  Returns:
    Final metrics of every split; None if `stop_at` or SIGTERM stopped the run
    before its end, with everything saved.

  Raises:
    KeyboardInterrupt: SIGINT stopped the run, with everything saved.
    RunError: data cannot be read; a loss, a gradient or an updated parameter is not
      finite; or a held-out loss is not finite or is far above that of guessing.
    ConfigError: there are checkpoints, but none is intact.
  """
  with Signals() as signals:
    # With several processes, the others would wait for this process forever.
    if ends_process and jax.process_count() == 1:
      signals.exit_message = before_first_step(workdir)
    results = _run(experiment, workdir, stop_at, signals)
  if results is None and signals.stop == signal.SIGINT:
    raise KeyboardInterrupt
  return results


def _run(
  experiment: Experiment,
  workdir: pathlib.Path,
  stop_at: int | None,
  signals: Signals,
) -> Results | None:
  """`run`, which `signals` may stop."""
  config = experiment.config.train
  mesh = parallel.make_mesh(config)
  arguments = experiment.model, experiment.task, config, mesh
  step, eval_step = make_step(*arguments), make_eval_step(*arguments)
  with contextlib.ExitStack() as stack:
    if jax.process_index() == 0:
      stack.enter_context(ownership.lock(workdir))
    # Another process may have finished the run since this one checked.
    finished = final_metrics(workdir, experiment.config)
    if cluster.any_of(finished is not None):
      return finished
    checkpoints = Checkpoints(workdir, config)
    stack.callback(checkpoints.close)
    shapes = parallel.with_shardings(
      experiment.shapes, parallel.shardings(mesh, experiment.shapes)
    )
    restored = checkpoints.restore(shapes)
    state, record = restored or (None, {})
    best = BestEvaluation(config, record.get("best", {}))
    if config.mesh.sequence > 1:
      # Tracing shows whether a mechanism supports shards of these lengths.
      try:
        step.lower(shapes, _read_batch(experiment, mesh, 0))
      except ValueError as error:
        raise ConfigError(f"config.mesh.sequence: {one_line(error)}") from error
    if state is None:
      state = experiment.init(mesh)
    else:
      state = parallel.place_state(mesh, state)
    first = int(state.step)
    writer = MetricsWriter(workdir, first, jax.process_index() == 0, config.log)
    stack.callback(writer.close)
    stack.enter_context(cluster.heartbeat(workdir))
    if first:
      print(f"continues from the checkpoint of step {first}", flush=True)

    # With several processes, one profile is enough.
    profiled = config.profiled if jax.process_index() == 0 else range(0)
    profile = Profile(profiled, workdir, first)
    stack.callback(profile.close)
    meter = LossMeter(
      record.get("meter", (0.0, 0.0)), record.get("seconds", 0.0), workdir
    )
    loop = _Loop(
      experiment=experiment,
      mesh=mesh,
      step=step,
      eval_step=eval_step,
      meter=meter,
      best=best,
      checkpoints=checkpoints,
      writer=writer,
      profile=profile,
      signals=signals,
    )
    last = first
    try:
      state = loop.train(state, stop_at or config.num_steps)
      if state is None:
        return None
      profile.close(state)
      last = int(state.step)
      signals.interrupt = True
      if config.checkpoint_keep == "best":
        del state  # Two states may not fit into memory.
        restored = checkpoints.restore(shapes, best=True)
        assert restored is not None
        state = parallel.place_state(mesh, restored[0])
      results = loop.finish(state, workdir)
    except Interrupted:
      print(stop_message(last))
      return None
    except jax.errors.JaxRuntimeError as error:
      # Exit here, because closing the context would wait for the lost process.
      cluster.end_lost(error)
    finally:
      signals.interrupt = False
    for values in results.values():
      if config.checkpoint_keep == "best":
        values["checkpoint"] = _checkpoint_name(
          int(state.step), checkpoints.best_step
        )
      if best.end and last < config.num_steps:
        values[STOPPED] = f"at step {last}: {best.end}"
    writer.write(last, results, meter.seconds)
    return results


def _checkpoint_name(step: int, best_step: int | None) -> str:
  """Describes the checkpoint from which the final metrics were computed."""
  if step == best_step:
    return f"of step {step}, the best"
  return f"of step {step}; the best, of step {best_step}, is damaged"


def _read_batch(
  experiment: Experiment, mesh: jax.sharding.Mesh, step: int
) -> Any:
  """Reads the batch of a step; each process reads only its own rows."""
  make = functools.partial(experiment.task.train_batch, step)
  return parallel.read_batch(mesh, make, experiment.config.train.batch_size)


@dataclasses.dataclass(frozen=True)
class _Loop:
  """What the steps of a run share.

  Attributes:
    experiment: the run.
    mesh: the mesh of both steps.
    step: from `make_step`.
    eval_step: from `make_eval_step`.
    meter: accumulates loss and time.
    best: compares evaluations, and ends the run early.
    checkpoints: the checkpoints of the run's folder.
    writer: writes metrics.jsonl.
    profile: the profile of some steps.
    signals: the signals of the process.
  """

  experiment: Experiment
  mesh: jax.sharding.Mesh
  step: Any
  eval_step: Any
  meter: LossMeter
  best: BestEvaluation
  checkpoints: Checkpoints
  writer: MetricsWriter
  profile: Profile
  signals: Signals

  def train(self, state: TrainState, stop_at: int) -> TrainState | None:
    """Trains all steps; returns the last state, or None if the run was stopped before."""
    config, task = self.experiment.config.train, self.experiment.task
    meter, best = self.meter, self.best
    first, last = int(state.step), config.num_steps
    if best.end:
      return state
    if stop_at <= first < last:
      print(stop_message(first))
      return None
    progress = Progress(first, last, shown=jax.process_index() == 0)

    def load(number):
      try:
        return _read_batch(self.experiment, self.mesh, number)
      # Readers may raise any exception.
      except Exception as error:
        raise RunError(
          f"step {number + 1}: data cannot be read: {one_line(error)}"
        ) from error

    with (
      contextlib.closing(progress),
      contextlib.closing(prefetch(load, first, last)) as batches,
    ):
      for number, batch in enumerate(batches, first):
        with self.profile.step(number, state):
          state, metrics = self.step(state, batch)
        self.signals.exit_message = ""
        meter.add(number, metrics)
        done = number + 1

        log = done % config.log_every == 0 or done == last
        is_due = done % config.eval_every == 0
        evaluation = (is_due or done == stop_at) and done < last
        save = done % config.checkpoint_every == 0 or done == last
        stop = self.signals.stop is not None or done == stop_at
        if jax.process_count() > 1:
          # All processes have to stop at the same step.
          stop = (log or evaluation or save) and cluster.any_of(stop)
        if log or evaluation or save or stop or number == first:
          meter.fetch()
        if number == first:
          meter.discard_first_step()
          progress.restart_clock(done, meter.seconds)
        if log:
          values = meter.flush()
          self.writer.write(done, {"train": values}, meter.seconds)
          progress.update(done, values, meter.seconds)
        gain = None
        if evaluation or (done == last and config.tracks_best):
          split = task.eval_splits[0]
          values = self.evaluate(state, split)
          if evaluation:  # After the last step, `finish` reports more metrics.
            self.writer.write(done, {split: values}, meter.seconds)
            # The baselines were printed at the start of the run.
            shown = {k: x for k, x in values.items() if k not in task.baselines}
            progress.say(f"step {done}  {split}  {format_values(shown)}")
          if config.tracks_best and (is_due or done == last):
            # A run that stops later does not have the other evaluations.
            gain = best.add(values, counts=is_due)
        if config.checkpoint_keep == "best":
          save |= gain is not None
        if save or stop or best.end:
          record: dict[str, Any] = {
            "meter": meter.sums,
            "seconds": meter.seconds,
          }
          if config.tracks_best:
            record["best"] = best.record
          self.checkpoints.save(state, record, gain)
        if best.end and done < last:
          progress.say(f"step {done}  {best.end}")
          return state
        if stop and done < last:
          print(stop_message(done))
          return None
        if evaluation or save:
          meter.skip_clock()
    return state

  def evaluate(self, state: TrainState, split: str) -> dict[str, Any]:
    """Evaluates a split; raises RunError if the first split has an implausible loss."""
    task = self.experiment.task
    values = evaluate.evaluate(
      self.eval_step, self.mesh, state.variables, task, split
    )
    # Other splits may have lengths that the model has not learned.
    if split == task.eval_splits[0]:
      # A task with its own loss has no uniform guess.
      has_own_loss = hasattr(task, "loss")
      guess = math.inf if has_own_loss else math.log(task.target_vocab_size)
      self.meter.check_held_out(int(state.step), values["loss"], guess)
    return values

  def finish(self, state: TrainState, workdir: pathlib.Path) -> Results:
    """Evaluates and decodes every split; writes samples, sentences and attention maps.

    Samples and sentences are from the last split that has any.
    """
    experiment = self.experiment
    task, results, samples = experiment.task, {}, []
    variables = state.variables
    if jax.process_count() > 1:  # Only the first process generates and draws.
      variables = parallel.to_host(variables)
    for split in task.eval_splits:
      values = self.evaluate(state, split)
      if jax.process_index() == 0:
        decoded, scores = evaluate.generate(experiment, variables, split)
        samples = decoded or samples
        # Scores of generation and play are printed before the loss.
        values = scores | values
      results[split] = values
    if jax.process_index() == 0:
      if samples:
        evaluate.write_samples(workdir / "samples.txt", samples)
        evaluate.write_sentences(workdir / evaluate.SENTENCES, task, samples)
      attention_maps.draw_attention(
        workdir / "attention.png",
        experiment.model,
        jax.device_get(variables),
        task,
        task.eval_batches(task.eval_splits[-1]),
      )
    return results


def prefetch(
  make: Callable[[int], T], first: int, last: int, depth: int = 2
) -> Generator[T, None, None]:
  """Yields `make(first), …, make(last - 1)`, computed ahead in one thread.

  It prepares the next batches while the device computes. At most `depth` results are
  computed ahead.

  Yields:
    The results.

  Raises:
    Exception: the exception that `make` raised, instead of its result.
  """
  executor = concurrent.futures.ThreadPoolExecutor(
    1, thread_name_prefix="prefetch"
  )
  try:
    futures = [
      executor.submit(make, i) for i in range(first, min(first + depth, last))
    ]
    for i in range(first, last):
      result = futures.pop(0).result()
      if i + depth < last:
        futures.append(executor.submit(make, i + depth))
      yield result
  finally:
    executor.shutdown(wait=False, cancel_futures=True)


def before_first_step(workdir: pathlib.Path) -> str:
  """Returns the message for a run that is stopped before its first new step."""
  step = newest_step(workdir)
  return stop_message(step) if step else "stopped before the first step"


def stop_message(step: int) -> str:
  """Returns the message for a run that is stopped and can be continued."""
  return f"stopped and saved at step {step}; run it again to continue"
