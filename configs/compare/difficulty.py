"""Compares the number of pairs that mechanisms with equal state size recall.

    python compare.py --config=configs/compare/difficulty.py --workdir=/tmp/difficulty

One model is trained on 4, 8 and 16 pairs in 64 positions, each in a third of its
examples, as in Zoology (Arora et al., arXiv:2312.04927), and evaluated on each number.
If it were trained on one number only, 4 pairs would give a quarter of the answers that
16 pairs give. Each of two rates is a separate row, so no rate is chosen and every seed
is reported. The model is that of `capacity.py` at width 64. `pairs-recall` in plots/
shows the recall of every seed against the number of pairs; docs/results.md has the
results.
"""

import ml_collections

from configs.compare import capacity


def get_config() -> ml_collections.ConfigDict:
  """Six recurrences whose states have 64 × 64 numbers in each of two layers."""
  config = capacity.get_config()
  config.attention = "linear,retention,gated_linear,mamba2,delta,gated_delta"
  config.seeds = "0,1,2,3"
  config.num_steps = 2000
  config.checkpoint_every = 1000
  config.task.fewer_pairs = (4, 8)
  config.across.model.features = (64,)
  config.across.optimizer.learning_rate = (3e-3, 1e-2)
  del config.grid.optimizer.learning_rate
  return config
