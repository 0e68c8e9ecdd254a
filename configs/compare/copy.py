"""Compares mechanisms on copying sequences of symbols.

    python compare.py --config=configs/compare/copy.py --workdir=/tmp/compare
    python compare.py --config=configs/compare/copy.py \
      --config.attention=dense,performer,nystrom --config.seeds=0,1,2

Every run is `configs/copy.py` at half its width and a third of its steps. The width of
the feed-forward layers gives all models the parameter count of the model with dense
attention, which copies every held-out sequence at this size. You can set any config
field for all runs: `--config.num_steps=50`.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """All mechanisms, one seed."""
  return experiments.comparison(
    "copy",
    "all",
    seeds="0",
    num_steps=400,
    eval_every=50,
    model={"features": 64, "mlp_features": 128},
    optimizer={"learning_rate": 2e-3},
  )
