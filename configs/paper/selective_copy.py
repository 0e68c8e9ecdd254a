"""Selective copying at the size of the Mamba paper.

    python train.py --config=configs/paper/selective_copy.py:dense

The model has to remember 16 symbols among 4,096 positions. It has not been run at full
length.

Gu and Dao, Mamba, section 4.1.1 and appendix E.1, arXiv:2312.00752.
"""

import ml_collections

from configs import attentions, selective_copy


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder that remembers 16 symbols among 4,096 positions."""
  config = selective_copy.get_config(attention)
  config.update(
    {
      "num_steps": 400000,
      "eval_every": 10000,
      "checkpoint_every": 10000,
      "task": {"length": 4096, "num_tokens": 16},
      "model": {"features": 64},
      "optimizer": {"learning_rate": 1e-4, "schedule": "constant"},
    }
  )
  config.model.decoder_attention = attentions.layers(attention, long=True)
  return config
