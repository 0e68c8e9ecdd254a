"""ListOps: the value of a nested expression, as one of ten classes.

    python train.py --config=configs/listops.py:dense

configs/paper/listops.py has the size of Long Range Arena.

Nangia and Bowman, arXiv:1804.06028; Tay et al., arXiv:2011.04006.
"""

import ml_collections

from configs import attentions


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """An encoder of four layers, on expressions of up to 64 tokens."""
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "num_steps": 4000,
      "batch_size": 64,
      "eval_every": 1000,
      "checkpoint_every": 1000,
      "log_every": 50,
      "parallel": "jit",
      "decode_method": "greedy",
      "task": {
        "name": "listops",
        "max_depth": 4,
        "max_args": 5,
        "min_length": 8,
        "max_length": 64,
        "train_size": 0,
        "eval_size": 1000,
      },
      "model": {
        "kind": "encoder",
        "num_layers": 4,
        "num_heads": 4,
        "features": 64,
        "mlp_features": 128,
        "position": "sinusoidal",
        "dropout_rate": 0.0,
        "encoder_attention": attentions.one(attention),
      },
      "optimizer": {
        "name": "adamw",
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_steps": 100,
        "b2": 0.98,
        "clip_norm": 1.0,
      },
    }
  )
