"""Masked language modelling of the bytes of a text (Perceiver IO).

python train.py --config=configs/perceiver_bytes.py --config.task.path=input.txt
"""

import ml_collections

from configs import attentions


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """2,048 bytes through 64 latents, at the size of a CPU."""
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "num_steps": 1000,
      "batch_size": 8,
      "eval_every": 250,
      "checkpoint_every": 500,
      "log_every": 50,
      "parallel": "jit",
      "task": {
        "name": "text",
        "path": "",
        "context": 2048,
        "vocabulary": "bytes",
        "mask_rate": 0.15,
      },
      "model": {
        "kind": "perceiver",
        "num_latents": 64,
        "num_layers": 4,
        "num_blocks": 1,
        "num_heads": 4,
        "features": 128,
        "mlp_features": 256,
        "input_features": 64,
        "input_heads": 4,
        "output_heads": 4,
        "output_residual": False,
        "head": "tokens",
        "encoder_attention": attentions.one(attention),
        "cross_attention": attentions.choose(attention)["cross_attention"],
      },
      "optimizer": {
        "name": "adamw",
        "learning_rate": 2e-3,
        "schedule": "cosine",
        "warmup_steps": 100,
        "b2": 0.98,
        "weight_decay": 0.01,
        "clip_norm": 1.0,
      },
    }
  )
