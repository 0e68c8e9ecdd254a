"""Multi-query associative recall: looks a value up by its key, many times.

    python train.py --config=configs/recall.py:dense

The paper's settings are a vocabulary of 8,192 and (length, pairs) (64, 4),
(128, 8) and (256, 16), each with 100,000 examples trained 64 times in batches
of 512 (256 at length 256), widths 64 to 512, learning rates 1e-4 to 1e-2:
`--config.task.vocab_size=8192 --config.task.train_size=100000
--config.task.length=256 --config.task.num_pairs=16 --config.batch_size=256
--config.num_steps=25000 --config.model.position=learned
--config.optimizer.weight_decay=0.1`. Its attention has no feed-forward layers.

Arora et al., Zoology, arXiv:2312.04927.
"""

import ml_collections

from configs import attentions


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A decoder of two layers with one head, on 4 pairs in 64 places."""
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "num_steps": 2000,
      "batch_size": 64,
      "eval_every": 500,
      "checkpoint_every": 500,
      "log_every": 50,
      "parallel": "jit",
      "decode_method": "greedy",
      "task": {
        "name": "recall",
        "vocab_size": 64,
        "length": 64,
        "num_pairs": 4,
        "train_size": 0,
        "eval_size": 1000,
      },
      "model": {
        "kind": "decoder",
        "num_layers": 2,
        "num_heads": 1,
        "features": 128,
        "mlp_features": 256,
        "position": "rotary",
        "dropout_rate": 0.0,
        "decoder_attention": attentions.one(attention),
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
