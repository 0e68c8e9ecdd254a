"""Measures one run in a process of its own, so that its memory is its own.

    python -m comparison.measure --workdir=RUN --out=FILE
    python -m comparison.measure --config=configs/copy.py:lsh --out=FILE

The first measures a trained run, the second times the step of one that is still
to be made: a budget of seconds becomes a number of steps. Both write JSON.
"""

from pathlib import Path

from absl import flags

from comparison import measurements
from training import (
  claimed,
  config_flag,
  entry,
  experiment,
  experiment_config,
  host_memory,
)

_CONFIG = config_flag.define("as for train.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of a trained run")
_MAP = flags.DEFINE_bool("map", False, "attention map of one example as well")
_OUT = flags.DEFINE_string("out", None, "a .json file", required=True)


def main() -> None:
  """Writes what was measured, whole or not at all."""
  host_memory.keep_freed()  # As in training.
  if _WORKDIR.value is None:
    _, mapping = entry.load_config(_CONFIG)
    run = experiment.create(experiment_config.parse(mapping))
    found = measurements.step_cost(run, run.task.train_batch(0))
  else:
    folder = Path(_WORKDIR.value)
    found = measurements.trained(folder, with_map=_MAP.value)
  claimed.replace(Path(_OUT.value), found)


if __name__ == "__main__":
  entry.run(main)
