"""Compares recall with and without a short convolution, at a tuned rate.

    python compare.py --config=configs/compare/short_convolution.py --workdir=/tmp/short

`capacity.py` has 16 pairs and the convolution in every model. Without it dense
attention recalls 11 % of 16 pairs after 4,000 steps, so that nothing could be compared;
here there are 4 pairs and twice the steps, which is enough for dense attention both
ways. The width is 64; all else is as there.

It took 165 minutes on one CPU core. Exact attention recalls all pairs both ways, and
recurrences 26 to 61 % without the convolution and all or nearly all with it; what came
out is in docs/results.md.
"""

import ml_collections

from configs.compare import capacity


def get_config() -> ml_collections.ConfigDict:
  """Every mechanism that a decoder can have, with and without the convolution."""
  config = capacity.get_config()
  config.num_steps = config.eval_every = 2400
  config.checkpoint_every = 1200
  config.across.model.features = (64,)
  config.across.model.short_convolution = (False, True)
  config.grid.optimizer.learning_rate = (1e-3, 3e-3, 1e-2)
  config.task.num_pairs = 4
  return config
