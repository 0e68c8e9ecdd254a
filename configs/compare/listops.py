"""Compares encoders on ListOps, with expressions sized for a CPU.

    python compare.py --config=configs/compare/listops.py --workdir=/tmp/listops

Expressions have 8 to 64 tokens, and runs have 2,000 steps of 32 expressions. Every
mechanism that an encoder supports is compared, except `flash`, which computes the same
as `dense`. The report also shows two rules that use little of an expression: the
operator at the root, and that operator applied to its digit arguments. A run took 1.5
to 6 minutes on one CPU core; docs/results.md has the results. `long_range.py` has
lengths for a GPU.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Four-layer encoders of width 64, three seeds, one learning rate."""
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
