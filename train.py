"""Launches one experiment.

    python train.py --config=configs/copy.py
    python train.py --config=configs/copy.py:performer --workdir=/tmp/run
    python train.py --config=configs/recall.py:sliding_window:window=8,delta
    python train.py --config=configs/listops.py:lsh --config.model.num_layers=2

The same command continues a run that was stopped or killed. Several processes form
one run with --coordinator, --num_processes and --process_id; SLURM, Open MPI,
Kubernetes and TPU pods need no flags (docs/scaling.md).
"""

from pathlib import Path

# Imported first, because it reports missing packages.
import training  # noqa: F401  # isort: skip

from absl import flags

from training import experiment, experiment_config, loop, workdir
from training.commands import config_flag, config_help, entry
from training.devices import cluster, process

_CONFIG = config_flag.define(
  "FILE.py or FILE.py:MECHANISM, with options such as lsh:chunk_size=8, and commas "
  "between several that layers take in turn; any config field can be set, such as "
  "--config.model.num_layers=2"
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "folder of the run; by default one under runs/"
)
_STOP_AT = flags.DEFINE_integer(
  "stop_at",
  None,
  "step at which to evaluate, save and end; without it, or with a later step, the "
  "same command continues the run",
  lower_bound=1,
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of the first process, for several processes"
)
_NUM_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "number of processes of the run", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
  "process_id", None, "index of this process, from 0", lower_bound=0
)


def main() -> None:
  """Trains the run of the config, and prints its results."""
  file, mapping = entry.load_config(_CONFIG)
  cluster.join(_COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
  config = experiment_config.parse(mapping)
  typed = _WORKDIR.value
  folder = workdir.default(file, config) if typed is None else Path(typed)
  workdir.check(folder, config)
  results = workdir.final_metrics(folder, config)
  if results is not None:
    print(workdir.finished_message(folder, config), flush=True)
  else:
    process.keep_freed_memory()
    process.cache_programs()
    run = experiment.begin(config, folder)
    print(f"{folder}: {experiment.describe(run)}", flush=True)
    for name, value in run.task.baselines.items():
      print(f"  {name} {value:.4f}", flush=True)
    for line in experiment.dense_reasons(file, config):
      print(f"  {line}", flush=True)
    results = loop.run(run, folder, stop_at=_STOP_AT.value, ends_process=True)
  if results is not None:
    print(workdir.summary(folder, results))


if __name__ == "__main__":
  entry.run(main, describe=config_help.text)
