"""Compares all mechanisms that a ViT supports, on scanned digits.

    python compare.py --config=configs/compare/vit.py --workdir=/tmp/vit
    python compare.py --config=configs/compare/vit.py --config.seeds=0 \
      --config.attention=dense,performer,window_2d --config.num_steps=1000

Every run is `configs/vit.py` with two layers of width 32, at equal parameter counts.
The 42 runs took an hour on 2 CPU cores shared with other jobs; projects/vision/docs.md
has the table: linformer 95.6 % of the held-out digits, dense 88.0 %, strided_2d 78.4 %.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """All mechanisms, three seeds."""
  return experiments.comparison(
    "vit",
    "all",
    num_steps=1500,
    model={"num_layers": 2, "features": 32, "mlp_features": 64},
  )
