"""Compares the effect of windows, features and heads on recall.

    python compare.py --config=configs/compare/capacity_sizes.py --workdir=/tmp/sizes

`capacity.py` changes the size of the memory only by the width of the model. Here the
width is 32, and the window, the number of random features and the number of heads vary:
with N heads of width 32/N, the states of linear attention, Mamba-2 and the delta rule
have 32²/N numbers; Performer's states, and keys and values, hardly change. Everything
else is as in `capacity.py`.
"""

import ml_collections

from configs.compare import capacity

_WINDOWS = (16, 32, 48)
_FEATURES = (32, 128)


def get_config() -> ml_collections.ConfigDict:
  """Windows, features and recurrences, each with one head and with four."""
  windows = {
    f"window_{w}": {"name": "sliding_window", "window": w} for w in _WINDOWS
  }
  features = {
    f"performer_{m}": {"name": "performer", "num_features": m}
    for m in _FEATURES
  }
  config = capacity.get_config()
  config.attention = ",".join(
    ["dense", *windows, *features, "linear", "mamba2", "delta"]
  )
  config.variants = windows | features
  config.across.model.features = (32,)
  config.across.model.num_heads = (1, 4)
  del config.model.num_heads
  return config
