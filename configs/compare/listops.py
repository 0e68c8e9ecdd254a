"""Compares encoders on ListOps, with expressions sized for a CPU.

    python compare.py --config=configs/compare/listops.py --workdir=/tmp/listops

Expressions of 8 to 64 tokens, 2,000 steps of 32 of them, by every mechanism that can be
an encoder; `flash` computes the same as `dense` and is left out. The report names
what two rules answer that read little of an expression (docs/results.md):
the operator at the root, and that operator on those of its arguments that are digits.
A run took 1.5 to 6 minutes on one CPU core; what came out is in docs/results.md.
`long_range.py` has the lengths of a GPU.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Encoders of four layers of width 64, three seeds, one learning rate."""
  return experiments.comparison(
    "listops",
    "dense,sliding_window,bigbird,linear,performer,linformer,lsh,"
    "nystrom,additive,multiplicative,differential,latent",
    num_steps=2000,
    batch_size=32,
    eval_every=250,
    checkpoint_every=2000,
    references={
      "listops": {
        "the operator at the root": {"accuracy": 0.234},
        "that operator on its digits": {"accuracy": 0.435},
      }
    },
    task={"eval_size": 2000},
    optimizer={"learning_rate": 2e-3},
  )
