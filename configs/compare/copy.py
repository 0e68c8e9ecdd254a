"""Compares mechanisms on copying sequences of symbols.

    python compare.py --config=configs/compare/copy.py --workdir=/tmp/compare
    python compare.py --config=configs/compare/copy.py \
      --config.attention=dense,performer,nystrom --config.seeds=0,1,2

Every run is `configs/copy.py` with fewer steps, the feed-forward layers as wide
as it takes for all models to have the parameters of the one with dense
attention. Any leaf of a run's config can be set for all: `--config.num_steps=50`.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """All mechanisms, one seed."""
  return ml_collections.ConfigDict(
    {
      "tasks": "copy",
      "attention": "all",
      "seeds": "0",
      "match_parameters": True,
      "num_steps": 400,
      "eval_every": 100,
      "task": {},
      "model": {},
      "optimizer": {},
    }
  )
