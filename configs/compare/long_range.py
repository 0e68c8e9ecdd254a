"""Compares encoders on the generated tasks of Long Range Arena.

    python compare.py --config=configs/compare/long_range.py --workdir=/tmp/long
    python compare.py --config=configs/compare/long_range.py --workdir=/tmp/long \
      --config.tasks=paper/listops --config.attention=dense,performer

ListOps of up to 512 tokens (the paper has 501 to 1,999) and Pathfinder at 32 × 32
pixels, by every mechanism that can be an encoder, three seeds. It asks for a GPU and was
not run at full length. On one CPU core a step of `dense` takes 0.9 s in ListOps, which
is 80 minutes a run; in Pathfinder it took 20 s on cores that other runs shared, which is
110 hours a run. `listops_512.py` has these expressions and this model with fewer and
smaller steps.
"""

import ml_collections

from configs import experiments
from configs.compare import listops_512


def get_config() -> ml_collections.ConfigDict:
  """Encoders of four layers of width 64."""
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
