"""Compares all mechanisms that a Conformer supports, on dialled digits.

    python compare.py --config=configs/compare/conformer.py --workdir=/tmp/conformer
    python compare.py --config=configs/compare/conformer.py --config.seeds=0 \
      --config.attention=dense,performer,linformer --config.num_steps=100

Every run is `configs/conformer.py` at -10 dB with rotary positions, which more
mechanisms support than Transformer-XL's, at equal parameter counts. It has not been
run at full length yet.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """All mechanisms, three seeds."""
  return experiments.comparison(
    "conformer",
    "all",
    num_steps=500,
    task={"snr": -10.0},
    model={"position": "rotary"},
  )
