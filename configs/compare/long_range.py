"""Compares encoders on the generated tasks of Long Range Arena.

    python compare.py --config=configs/compare/long_range.py --workdir=/tmp/long
    python compare.py --config=configs/compare/long_range.py --workdir=/tmp/long \
      --config.tasks=paper/listops --config.attention=dense,performer

The tasks are ListOps of up to 512 tokens (the paper has 501 to 1,999) and Pathfinder at
32 × 32 pixels, for every mechanism that an encoder supports, with three seeds. This
needs a GPU and has not been run at full length. On one CPU core, a step of `dense`
takes 0.9 s in ListOps, or 80 minutes per run; in Pathfinder it took 20 s on shared
cores, or 110 hours per run. `listops_512.py` has the same expressions and model with
fewer steps and smaller batches.
"""

import ml_collections

from configs import experiments
from configs.compare import listops_512


def get_config() -> ml_collections.ConfigDict:
  """Four-layer encoders of width 64."""
  listops = listops_512.get_config()
  return experiments.comparison(
    "paper/listops,pathfinder",
    "dense,flash,sliding_window,bigbird,linear,performer,"
    "linformer,lsh,nystrom,additive,multiplicative,differential,latent",
    per_task={
      "paper/listops": {
        "num_steps": 5000,
        "batch_size": 32,
        "task": listops.task,
        "model": listops.model,
        "optimizer": {"weight_decay": 0.0},
      },
      "pathfinder": {"num_steps": 20000},
    },
  )
