"""Compares mechanisms on copying sequences of symbols.

    python compare.py --config=configs/compare/copy.py --workdir=/tmp/compare
    python compare.py --config=configs/compare/copy.py \
      --config.attention=dense,performer,nystrom --config.seeds=0,1,2

Every run is `configs/copy.py` at half its width and a third of its steps, the
feed-forward layers as wide as it takes for all models to have the parameters of
the one with dense attention, which copies every held-out sequence then. Any leaf
of a run's config can be set for all: `--config.num_steps=50`.
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
