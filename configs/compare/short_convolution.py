"""Compares recall with and without a short convolution, at a tuned rate.

    python compare.py --config=configs/compare/short_convolution.py --workdir=/tmp/short

`capacity.py` has 16 pairs, and the convolution in every model. Without it, dense
attention recalls only 11 % of 16 pairs after 4,000 steps, too little for a comparison.
Here there are 4 pairs in 32 positions, and twice the steps. The width is 64; rates and
seeds are as in `capacity.py`. docs/results.md has the results.
"""

import ml_collections

from configs.compare import capacity


def get_config() -> ml_collections.ConfigDict:
  """Exact attention, windows and states, with and without the convolution."""
  config = capacity.get_config()
  config.attention = (
    "dense,sliding_window,window_linear,linear,mamba2,delta,gated_delta"
  )
  config.num_steps, config.eval_every = 2400, 120
  config.checkpoint_every = 1200
  config.across.model.features = (64,)
  config.across.model.short_convolution = (False, True)
  config.task.num_pairs = 4
  config.task.length = 32
  return config
