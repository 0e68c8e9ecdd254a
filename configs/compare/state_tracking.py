"""Compares mechanisms on permutations, and beyond the trained length.

    python compare.py --config=configs/compare/state_tracking.py \
      --config.task.letters=2 --config.num_steps=600 --workdir=/tmp/parity
    python compare.py --config=configs/compare/state_tracking.py --workdir=/tmp/states
    python compare.py --config=configs/compare/state_tracking.py \
      --config.task.letters=5 --workdir=/tmp/s5

Every run is configs/state_tracking.py: two layers, trained at length 32 and evaluated
up to 256, with eight seeds. `delta2`, `gated_delta2`, `comba2` and
`gated_delta_2_rate2` have β up to 2, as `delta_product` has by default. On one busy CPU
core, the first command (two letters) took 36 minutes, the second (three letters) about
75, and the third (five letters) 42. docs/results.md has the results.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Exact attention, linear attention and the recurrences."""
  return experiments.comparison(
    "state_tracking",
    "dense,linear,retention,lightning,gated_linear,mamba2,mamba3,"
    "delta,delta2,gated_delta,gated_delta2,kimi_delta,comba,comba2,"
    "gated_delta_2,gated_delta_2_rate2,delta_product,rwkv7,mesa,log_linear,"
    "stick_breaking,path",
    seeds=experiments.EIGHT,
    num_steps=2000,
    eval_every=100,
    variants={
      "delta2": {"name": "delta", "max_rate": 2.0},
      "gated_delta2": {"name": "gated_delta", "max_rate": 2.0},
      "comba2": {"name": "comba", "max_rate": 2.0},
      "gated_delta_2_rate2": {"name": "gated_delta_2", "max_rate": 2.0},
      "delta_product4": {"name": "delta_product", "num_householder": 4},
    },
  )
