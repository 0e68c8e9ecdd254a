"""Selective copying: gives back the symbols that count, without the noise.

    python train.py --config=configs/selective_copy.py:dense

Mamba's setting is 16 symbols to remember among 4,096 places, a vocabulary of
16 with noise and mark, two layers of width 64, and 400,000 steps of 64 rows:
`--config.task.length=4096 --config.task.num_tokens=16
--config.model.features=64 --config.num_steps=400000
--config.optimizer.learning_rate=1e-4 --config.optimizer.schedule=constant`.

Jing et al., arXiv:1706.02761; Gu and Dao, Mamba, section 4.1.1 and appendix
E.1, arXiv:2312.00752.
"""

import ml_collections

from configs import attentions


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A decoder of two layers that remembers 4 symbols among 64 places."""
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
        "name": "selective_copy",
        "vocab_size": 16,
        "length": 64,
        "num_tokens": 4,
        "eval_size": 1000,
      },
      "model": {
        "kind": "decoder",
        "num_layers": 2,
        "num_heads": 4,
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
