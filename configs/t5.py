"""Span corruption of a text, as T5 is trained.

python train.py --config=configs/t5.py --config.task.path=input.txt
"""

import ml_collections

from configs import attentions


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """An encoder-decoder with T5's relative positions, at the size of a CPU."""
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "num_steps": 4000,
      "batch_size": 64,
      "eval_every": 500,
      "checkpoint_every": 1000,
      "log_every": 100,
      "parallel": "jit",
      "decode_method": "greedy",
      "task": {
        "name": "text",
        "path": "",
        "context": 64,
        "vocabulary": "subwords",
        "vocab_size": 512,
        "tokenizer": "",
        "mask_rate": 0.15,
        "mean_span_length": 3.0,
      },
      "model": {
        "kind": "encoder_decoder",
        "num_layers": 2,
        "num_heads": 4,
        "features": 128,
        "mlp_features": 256,
        "activation": "relu",
        "position": "t5",
        "norm": "pre",
        "dropout_rate": 0.0,
        **attentions.choose(attention),
      },
      "optimizer": {
        "name": "adamw",
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "warmup_steps": 500,
        "b2": 0.98,
        "clip_norm": 1.0,
      },
    }
  )
