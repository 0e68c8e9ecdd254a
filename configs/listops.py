"""ListOps: the value of a nested expression, as one of ten classes.

    python train.py --config=configs/listops.py:dense

Long Range Arena's setting is expressions of 501 to 1,999 tokens, 96,000 of
them, six layers of width 512 with 8 heads, and 5,000 steps of 32 rows:
`--config.task.min_length=501 --config.task.max_length=1999
--config.task.max_depth=10 --config.task.max_args=10
--config.task.train_size=96000 --config.model.num_layers=6
--config.model.features=512 --config.model.num_heads=8
--config.model.mlp_features=2048 --config.batch_size=32
--config.num_steps=5000 --config.optimizer.weight_decay=0.1`.

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
