"""Compares attention to selected keys with attention to all keys.

    python compare.py --config=configs/compare/sparse.py --workdir=/tmp/sparse

The tasks are recall of 16 pairs at the beginning, and one needle among three others.
Two-layer models of width 64 with `model.short_convolution` and without positions are
trained at length 128 and evaluated at 512 and 2,048. MoBA attends to the query's own
block of 16 keys and to one selected block, DeepSeek's sparse attention to 32 selected
keys, and a sliding window to the last 32. Native sparse attention attends to three
fixed blocks of 16, one selected block, weighted sums of all blocks, and a window of 32.
For every row, four seeds choose one of two learning rates. For the results in
docs/results.md, two seeds halved the rates once (`--config.halving.rungs=0.5
--config.halving.seeds=2`).
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Three selections, a window and exact attention, eight seeds."""
  return experiments.comparison(
    "recall,needle",
    "flash,window32,moba2,nsa4,dsa32",
    seeds=experiments.EIGHT,
    num_steps=1000,
    eval_every=50,
    checkpoint_every=500,
    batch_size=32,
    variants={
      "window32": {"name": "sliding_window", "window": 31},
      "moba2": {"name": "moba", "block_size": 16, "top_k": 2},
      "nsa4": {
        "name": "nsa",
        "block_size": 16,
        "compress_size": 16,
        "stride": 8,
        "num_blocks": 4,
        "window": 32,
      },
      "dsa32": {"name": "dsa", "top_k": 32},
    },
    grid={"optimizer": {"learning_rate": (3e-3, 1e-2)}},
    halving={"rungs": (), "seeds": 4},
    per_task={
      "recall": {"task": {"vocab_size": 64, "num_pairs": 16, "power": 1.0}},
      "needle": {
        "num_steps": 600,
        "eval_every": 30,
        "checkpoint_every": 300,
        "task": {"num_keys": 8, "num_values": 8, "num_fillers": 8},
      },
    },
    task={"length": 128, "eval_lengths": (512, 2048), "eval_size": 200},
    model={
      "num_heads": 2,
      "features": 64,
      "mlp_features": 128,
      "position": "none",
      "short_convolution": True,
    },
  )
