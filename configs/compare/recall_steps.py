"""Compares the steps that mechanisms need to learn recall, at three learning rates.

    python compare.py --config=configs/compare/recall_steps.py --workdir=/tmp/steps

The task is recall of 16 pairs, as in `capacity.py`, at width 64. No rate is chosen: each
is a separate row. A run ends at the first evaluation with 97 % of the values correct, or
is censored at step 6,000. `--config.attention` compares other mechanisms.
"""

import ml_collections

from configs.compare import capacity


def get_config() -> ml_collections.ConfigDict:
  """Attention and seven recurrences, each at three rates."""
  config = capacity.get_config()
  config.attention = (
    "dense,delta,gated_delta,comba,mamba2,linear,retention,gated_linear"
  )
  config.across.model.features = (64,)
  config.across.optimizer.learning_rate = (3e-3, 1e-2, 3e-2)
  del config.grid.optimizer.learning_rate
  config.num_steps = 6000
  config.checkpoint_every = 6000
  config.best_metric = "accuracy"
  config.stopping_threshold = 0.97
  return config
