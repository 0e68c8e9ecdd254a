"""Compares how many pairs mechanisms with states of one size recall.

    python compare.py --config=configs/compare/difficulty.py --workdir=/tmp/difficulty

`capacity.py` at width 64 with 4, 8 and 16 pairs in the same 64 places. A rate chosen
for one number of pairs need not be the best for another, so that both rates are rows
of their own, with every seed reported. `difficulty-recall` in plots/ has the recall of
every seed against the number of pairs. What came out is in docs/results.md.
"""

import ml_collections

from configs.compare import capacity


def get_config() -> ml_collections.ConfigDict:
  """Six recurrences whose states have 64 × 64 numbers in each of two layers."""
  config = capacity.get_config()
  config.attention = "linear,retention,gated_linear,mamba2,delta,gated_delta"
  config.seeds = "0,1,2,3"
  config.across.model.features = (64,)
  config.across.task.num_pairs = (4, 8, 16)
  config.across.optimizer.learning_rate = (3e-3, 1e-2)
  del config.grid.optimizer.learning_rate
  del config.task.num_pairs
  return config
