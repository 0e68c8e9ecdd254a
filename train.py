"""Launches one experiment.

    python train.py --config=configs/copy.py
    python train.py --config=configs/copy.py:performer --workdir=/tmp/run
    python train.py --config=configs/listops.py:lsh --config.model.num_layers=2

The same command continues a run that was stopped or killed.
"""

from pathlib import Path

from absl import flags

from process import config_flag, entry

_CONFIG = config_flag.define(
  "FILE.py or FILE.py:MECHANISM; any leaf can be overridden, as "
  "--config.model.num_layers=2"
)
_WORKDIR = flags.DEFINE_string(
  "workdir", None, "folder of the run; by default one under runs/"
)


def main() -> None:
  """From the config to the result."""
  file, mapping = entry.load_config(_CONFIG)
  # JAX and the libraries on it take a second to import, so this is done once the
  # flags are parsed: --help does not wait for them. (A config has imported JAX.)
  from configs import attentions
  from process import cache, host_memory
  from training import experiment, experiment_config, loop, parallel, workdir

  config = experiment_config.parse(mapping)
  typed = _WORKDIR.value
  folder = workdir.default(file, config) if typed is None else Path(typed)
  workdir.check(folder, config)
  results = workdir.final_metrics(folder, config)
  if results is None:
    host_memory.keep_freed()
    cache.keep_programs()
    parallel.check_mesh(config.train, config.model)
    run = experiment.create(config, folder)
    workdir.write_config(folder, config)
    run.task.save(folder)
    print(f"{folder}: {experiment.describe(run)}", flush=True)
    for name, value in run.task.baselines.items():
      print(f"  {name} {value:.4f}", flush=True)
    for line in attentions.dense_because(file, config.model):
      print(f"  {line}", flush=True)
    results = loop.run(run, folder)
  if results is not None:
    print(workdir.summary(folder, results))


if __name__ == "__main__":
  entry.run(main)
