"""Compares encoders on ListOps of 128 to 512 tokens, sized for a CPU.

    python compare.py --config=configs/compare/listops_512.py --workdir=/tmp/listops512

`listops.py` has up to 64 tokens, and Long Range Arena has 501 to 1,999. Here mechanisms
have the sizes of configs/paper/ (windows of 64, rank 64), and the model has four layers
of width 64. 800 steps of 16 expressions are few, so they show only what is learned
first. The report also shows two rules that use little of an expression: the operator at
the root, and that operator applied to its digit arguments.

A run took 1 to 8 minutes on one CPU core, and 12 to 23 minutes for `latent`,
`multiplicative` and `differential`, whose steps are now three times as fast. Nine of
eleven encoders learned to use the operator at the root (28 to 34 %); `linear` and
`multiplicative` did not (13 to 16 %). docs/results.md has the results. `additive` was
not run.
"""

import ml_collections

from configs.compare import listops


def get_config() -> ml_collections.ConfigDict:
  """The encoders of `listops.py`, three seeds, one learning rate."""
  config = listops.get_config()
  config.tasks = "paper/listops"
  config.num_steps = config.checkpoint_every = 800
  config.eval_every = 200
  config.batch_size = 16
  config.task = {
    "min_length": 128,
    "max_length": 512,
    "max_depth": 8,
    "max_args": 8,
    "train_size": 0,
    "eval_size": 1000,
  }
  config.model = {
    "num_layers": 4,
    "features": 64,
    "num_heads": 4,
    "mlp_features": 128,
  }
  config.optimizer.weight_decay = 0.0
  config.references = {
    "paper/listops": {
      "the operator at the root": {"accuracy": 0.327},
      "that operator on its digits": {"accuracy": 0.448},
    }
  }
  return config
