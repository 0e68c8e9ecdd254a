"""Compares all mechanisms on copying, associative recall and number words.

    python compare.py --config=configs/compare/mechanisms.py --workdir=/tmp/all

Every mechanism has the parameter count of the dense model, the same optimiser settings
and one seed; `--config.seeds=0,1,2` adds more seeds to the same folder.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Three tasks at sizes that 2 CPU cores train in one to four minutes."""
  return experiments.comparison(
    "copy,recall,translation",
    "all",
    seeds="0",
    per_task={
      "copy": {"num_steps": 500, "eval_every": 100},
      "recall": {"num_steps": 1200, "eval_every": 200},
      "translation": {"num_steps": 1000, "eval_every": 200},
    },
  )
