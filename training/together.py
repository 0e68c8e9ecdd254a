"""Runs of one shape: one program, in one process, trains all of them.

Runs that differ in seed and learning rate alone compute the same thing on other
numbers. Their step is traced and compiled once, with these two as arguments, and then
either trains the runs one after another (`in_turn`) or all of them at once, under
`jax.vmap` (`side_by_side`). Every run keeps its own folder, checkpoints and lines in
metrics.jsonl, ends with the numbers of a run of its own up to rounding, and can be
continued by either, or by `train.py`.
"""

from collections.abc import Callable, Iterator, Sequence
import functools
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from settings.errors import ConfigError, RunError
from training import loop
from training import optimizer as optimizer_lib
from training import parallel as parallel_lib
from training import step as step_lib
from training.experiment import Experiment
from training.loop import Results, Updated
from training.signals import Signals

_TIMED_STEPS = 3
_LOOKED_AT = 8


class Member(NamedTuple):
  """One of the runs.

  Attributes:
    experiment: what to train; of all members the same but for seed and learning
      rate.
    workdir: of the run; its config is there already.
  """

  experiment: Experiment
  workdir: pathlib.Path


class Outcome(NamedTuple):
  """How one of the runs ended.

  Attributes:
    index: of the member.
    results: as of `loop.run`; None where it was stopped, or failed.
    error: why it failed; None where it did not.
  """

  index: int
  results: Results | None
  error: Exception | None = None


class Numbers(NamedTuple):
  """What tells the runs apart, as arguments of their program."""

  seed: Int[Array, "..."]
  learning_rate: Float[Array, "..."]


def in_turn(
  members: Sequence[Member], stop_at: int | None = None
) -> Iterator[Outcome]:
  """Trains one run after another, with a program that is compiled once.

  A run that fails does not stop the others; SIGTERM and SIGINT do, with everything
  saved.

  Args:
    members: at least one.
    stop_at: as in `loop.run`, for all.

  Yields:
    An outcome as soon as each run has ended.
  """
  first = members[0].experiment
  program = jax.jit(_train_step(first), donate_argnums=1)
  parallel = parallel_lib.make(first.functions, "jit")

  def lower(shapes, batch):
    placed = parallel.placed_shapes(shapes)
    return program.lower(_numbers(members[:1], 0), placed, batch, np.int32(0))

  with Signals() as signals:
    for index, member in enumerate(members):
      story = loop.story(
        _shared(member.experiment, first),
        member.workdir,
        parallel._replace(lower_train=lower),
        signals,
        stop_at,
        compiles=not index,
      )
      train = functools.partial(program, _numbers(members, index))
      try:
        yield Outcome(index, loop.told(story, train))
      except (ConfigError, RunError) as error:
        yield Outcome(index, None, error)
      if signals.stop:
        return


def side_by_side(
  members: Sequence[Member], stop_at: int | None = None
) -> Iterator[Outcome]:
  """Trains all runs at once: every step is one call, under `jax.vmap`.

  Runs need not be at the same step: one that continues from an earlier checkpoint
  ends later. A run that fails leaves its place to another, which is computed twice.

  Args:
    members: at least one.
    stop_at: as in `loop.run`, for all.

  Yields:
    An outcome as soon as each run has ended.
  """
  first = members[0].experiment
  program = _program_of_all(first)
  parallel = parallel_lib.make(first.functions, "jit")
  with Signals() as signals:
    stories = [
      loop.story(
        _shared(member.experiment, first),
        member.workdir,
        parallel,
        signals,
        stop_at,
        compiles=False,  # The first call of all does.
      )
      for member in members
    ]
    waiting: dict[int, loop.Update] = {}

    def go_on(index: int, answer: Updated | None) -> Outcome | None:
      """To a run's next update, or to its end."""
      story = stories[index]
      try:
        waiting[index] = next(story) if answer is None else story.send(answer)
      except StopIteration as end:
        waiting.pop(index, None)
        return Outcome(index, end.value)
      except (ConfigError, RunError) as error:
        waiting.pop(index, None)
        return Outcome(index, None, error)
      return None

    for index in range(len(members)):
      if outcome := go_on(index, None):
        yield outcome
    while waiting:
      order = sorted(waiting)
      # The program is of as many runs as there were.
      places = [order[i % len(order)] for i in range(len(members))]
      states, batches, steps = zip(*(waiting[i] for i in places), strict=True)
      answers = program(
        _numbers(members, np.array(places)), states, batches, np.stack(steps)
      )
      for index, answer in zip(order, answers, strict=False):
        if outcome := go_on(index, answer):
          yield outcome


def are_alike(members: Sequence[Member]) -> bool:
  """Whether runs can be trained side by side: their batches have one shape.

  Looks at the first batches of each. Where rows are sorted by length, as those of
  a text are, these differ already.
  """
  shapes = {
    tuple((name, array.shape) for name, array in sorted(batch.items()))
    for member in members
    for step in range(_LOOKED_AT)
    for batch in [member.experiment.task.train_batch(step)]
  }
  return len(shapes) == 1


def step_seconds(members: Sequence[Member]) -> dict[str, float]:
  """Time of a step of one run, in turn and side by side, measured here.

  Args:
    members: at least one.

  Returns:
    'in_turn' and 'side_by_side': seconds for each run, the median of three steps.
  """
  first = members[0].experiment
  parallel = parallel_lib.make(first.functions, "jit")
  states, batches = [], []
  for member in members:
    states.append(
      parallel.place_state(_shared(member.experiment, first).init())
    )
    batches.append(
      parallel.place_batch(dict(member.experiment.task.train_batch(0)))
    )
  places, step = np.arange(len(members)), np.int32(0)
  alone, of_all = jax.jit(_train_step(first)), _program_of_all(first)
  return {
    "in_turn": _seconds(
      lambda: alone(_numbers(members, 0), states[0], batches[0], step)
    ),
    "side_by_side": _seconds(
      lambda: of_all(
        _numbers(members, places),
        tuple(states),
        tuple(batches),
        np.zeros(len(members), np.int32),
      )
    )
    / len(members),
  }


def _seconds(call: Callable[[], Any]) -> float:
  """Median time of a call, after one that compiles."""
  seconds = []
  for _ in range(_TIMED_STEPS + 1):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return float(np.median(seconds[1:]))


def _train_step(experiment: Experiment) -> Callable[..., Updated]:
  """`(numbers, state, batch, step) -> (state, metrics)` of any of the runs."""
  config = experiment.config.train

  def step(numbers, state, batch, index):
    schedule = config.optimizer, config.num_steps, numbers.learning_rate
    functions = experiment.functions._replace(
      seed=numbers.seed,
      optimizer=optimizer_lib.make_optimizer(*schedule),
      schedule=optimizer_lib.make_schedule(*schedule),
    )
    return step_lib.train_step(functions, state, batch, index)

  return step


def _program_of_all(experiment: Experiment) -> Callable[..., list[Updated]]:
  """`(numbers, states, batches, steps) -> [(state, metrics), …]`, compiled.

  Takes and gives states one by one, so that a run can be saved, and can fail, alone;
  to stack them takes little next to a step.
  """

  @jax.jit
  def program(numbers, states, batches, steps):
    stack = functools.partial(jax.tree.map, lambda *leaves: jnp.stack(leaves))
    found = jax.vmap(_train_step(experiment))(
      numbers, stack(*states), stack(*batches), steps
    )
    return [
      jax.tree.map(lambda leaf, i=i: leaf[i], found) for i in range(len(states))
    ]

  return program


def _numbers(members: Sequence[Member], places: int | np.ndarray) -> Numbers:
  """The numbers of one run, or of several with an axis for them."""
  trains = [member.experiment.config.train for member in members]
  seeds = np.array([train.seed for train in trains], np.int32)
  rates = [train.optimizer.learning_rate for train in trains]
  return Numbers(seeds[places], np.array(rates, np.float32)[places])


def _shared(experiment: Experiment, first: Experiment) -> Experiment:
  """A run that begins with the first one's compiled `draw`, at its own seed."""
  if first.draw is None:
    return experiment
  seed = experiment.config.train.seed
  return experiment._replace(
    init=functools.partial(first.draw, seed), draw=None
  )
