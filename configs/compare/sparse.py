"""Compares selected keys with all keys at 2,048 positions, where most are skipped.

    python compare.py --config=configs/compare/sparse.py --workdir=/tmp/sparse

Recall of 64 pairs that stand at the beginning, and one needle among three others, by
two layers of width 64 with `model.short_convolution`. MoBA reads 4 blocks of 64 keys,
native sparse attention as many and a window of 128 keys, DeepSeek's sparse attention
256 keys, and a sliding window the last 256. What came out is in docs/results.md.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Three selections, a window and exact attention, three seeds."""
  return experiments.comparison(
    "recall,needle",
    "flash,window256,moba4,nsa4,dsa256",
    num_steps=600,
    eval_every=600,
    checkpoint_every=100,
    batch_size=4,
    variants={
      "window256": {"name": "sliding_window", "window": 255},
      "moba4": {"name": "moba", "block_size": 64, "top_k": 4},
      "nsa4": {"name": "nsa", "num_blocks": 4, "window": 128},
      "dsa256": {"name": "dsa", "top_k": 256},
    },
    per_task={
      "recall": {"task": {"vocab_size": 256, "length": 2048, "num_pairs": 64}},
      "needle": {"task": {"length": 2048, "eval_lengths": (1024,)}},
    },
    task={"eval_size": 100},
    model={
      "num_heads": 2,
      "features": 64,
      "mlp_features": 128,
      "short_convolution": True,
    },
    optimizer={"learning_rate": 3e-3},
  )
