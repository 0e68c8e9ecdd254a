"""Reformer's table: trained with some hash rounds, evaluated with others.

    python -m benchmarks.reformer_duplication --workdir=FOLDER

Trains `configs/reformer.py` four times, one run after another and each through
`train.py`, so a stopped table continues where it was. Every trained model is
then evaluated with full attention and with 8, 4, 2 and 1 rounds: same
parameters, other rotations. Prints accuracies of the second half next to those of
the paper's table 2.
"""

from pathlib import Path
import subprocess
import sys

from absl import flags
import jax
import ml_collections

from configs import reformer
from tasks import cache
from training import (
  entry,
  evaluate,
  experiment,
  experiment_config,
  inference,
  parallel,
)

_WORKDIR = flags.DEFINE_string(
  "workdir", None, "one run a folder under it", required=True
)
_SET = flags.DEFINE_multi_string(
  "set", [], "an override for all runs, as num_steps=100"
)

EVALUATED = ("full", "8", "4", "2", "1")
PAPER = {
  "full": (100.0, 94.8, 92.5, 76.9, 52.5),
  "4": (0.8, 100.0, 99.9, 99.4, 91.9),
  "2": (0.8, 100.0, 99.9, 98.1, 86.8),
  "1": (0.8, 99.9, 99.6, 94.8, 77.9),
}
"""Trained -> accuracy in percent for each of `EVALUATED`."""


def accuracy(
  config: ml_collections.ConfigDict, folder: Path, rounds: str
) -> float:
  """Percent of the second half that a trained model predicts with `rounds`.

  Args:
    config: of the run.
    folder: of the run.
    rounds: one of `EVALUATED`.
  """
  trained = experiment.create(
    experiment_config.parse(config.to_dict()), folder, restore=True
  )
  variables = inference.restore_variables(trained, folder)
  config = config.copy_and_resolve_references()
  config.model.decoder_attention = reformer.lsh(rounds)
  other = experiment.create(
    experiment_config.parse(config.to_dict()), folder, restore=True
  )
  functions = parallel.make(other.functions, "jit", jax.devices()[:1])
  results = evaluate.evaluate(
    functions,
    # Only the rotations are new, drawn from the run's seed.
    {
      "params": variables["params"],
      "constants": other.init().collections["constants"],
    },
    other.task,
    "validation",
  )
  return 100.0 * results["token_accuracy"]


def main() -> None:
  """Trains what is not trained yet, evaluates everything, prints the table."""
  cache.keep_programs()
  print(
    "| trained | " + " | ".join(f"evaluated {r}" for r in EVALUATED) + " |\n"
    "| --- |" + " --: |" * len(EVALUATED),
    flush=True,
  )
  for rounds in PAPER:
    folder = Path(_WORKDIR.value) / rounds
    config = reformer.get_config(rounds)
    for override in _SET.value:
      name, _, value = override.partition("=")
      config.update_from_flattened_dict({name: type(config[name])(value)})
    subprocess.run(
      [
        sys.executable,
        "train.py",
        f"--config=configs/reformer.py:{rounds}",
        f"--workdir={folder}",
        *(f"--config.{override}" for override in _SET.value),
      ],
      check=True,
      stdout=subprocess.DEVNULL,
    )
    got = [accuracy(config, folder, evaluated) for evaluated in EVALUATED]
    cells = (
      f"{ours:.1f} ({paper})"
      for ours, paper in zip(got, PAPER[rounds], strict=True)
    )
    print(f"| {rounds} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
  entry.run(main)
