"""How much of a run's wall time is the compiled training step.

    python -m benchmarks.step_share
    python -m benchmarks.step_share --config=configs/text.py --config.task.path=input.txt

Of one whole period of evaluation: the steps from one and a half periods on to
two and a half, with everything the loop does meanwhile (batches, logging, one
evaluation, checkpoints), and the same steps on the same batches, placed
beforehand, alone. These are timed before and after the loop and averaged, for
machines drift. The first evaluation, which is compiled, comes before.
"""

from collections.abc import Mapping, Sequence
import itertools
from pathlib import Path
import tempfile
import time
from typing import Any, cast

import jax
import numpy as np

from training import (
  config_flag,
  entry,
  experiment,
  experiment_config,
  host_memory,
  loop,
  parallel,
)

_CONFIG = config_flag.define(
  "as for train.py; num_steps becomes two and a half periods",
  default="configs/copy.py",
)


class _Watched:
  """A task that notes when each batch is asked for.

  The loop asks a few batches ahead, always as many, so that the time between two
  requests is that between the steps.
  """

  def __init__(self, task: Any):
    self._task = task
    self.asked: dict[int, float] = {}

  def __getattr__(self, name: str) -> Any:
    return getattr(self._task, name)

  def train_batch(self, step: int) -> Any:
    """The task's own, noted."""
    self.asked[step] = time.perf_counter()
    return self._task.train_batch(step)


def main() -> None:
  """Times both and prints one line."""
  host_memory.keep_freed()  # As train.py does.
  file, mapping = entry.load_config(_CONFIG)
  period = experiment_config.parse(mapping).train.eval_every
  begin, end = 3 * period // 2, 5 * period // 2
  mapping.num_steps = end + 16
  run = experiment.create(experiment_config.parse(mapping))
  watched = _Watched(run.task)
  compiled = parallel.make(run.functions, run.config.train.parallel)
  batches = [
    compiled.place_batch(run.task.train_batch(i)) for i in range(begin, end)
  ]
  before = _alone(run, compiled, batches)
  with tempfile.TemporaryDirectory() as folder:
    loop.run(run._replace(task=cast(Any, watched)), Path(folder))
  whole = watched.asked[end] - watched.asked[begin]
  alone = (before + _alone(run, compiled, batches)) / 2
  print(
    f"{file}: {end - begin} steps in {whole:.1f} s, the compiled step alone "
    f"{alone:.1f} s: {alone / whole:.1%}"
  )


def _alone(
  run: experiment.Experiment,
  compiled: parallel.Parallel,
  batches: Sequence[Mapping[str, Any]],
) -> float:
  """Seconds of the compiled steps on batches that are placed already."""
  shapes = {str(jax.tree.map(np.shape, batch)): batch for batch in batches}
  state = compiled.place_state(run.init())
  steps = itertools.count()

  def seconds(state, batches):
    start = time.perf_counter()
    for batch in batches:
      state, _ = compiled.train(state, batch, np.int32(next(steps)))
    jax.block_until_ready(state)
    return state, time.perf_counter() - start

  state, _ = seconds(state, shapes.values())
  return seconds(state, batches)[1]


if __name__ == "__main__":
  entry.run(main)
