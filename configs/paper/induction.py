"""Induction heads at the size of the Mamba paper.

    python train.py --config=configs/paper/induction.py:dense

The model is trained at length 256 and evaluated at other lengths, in the paper up to
2^20. It has not been run at full length.

Gu and Dao, Mamba, section 4.1.2 and appendix E.1, arXiv:2312.00752.
"""

import ml_collections

from configs import attentions, induction


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder with eight heads, trained at length 256."""
  config = induction.get_config(attention)
  config.update(
    {
      # 25 epochs of 8,192 batches.
      "num_steps": 204800,
      "batch_size": 8,
      "eval_every": 8192,
      "checkpoint_every": 8192,
      "task": {"length": 256, "eval_lengths": (64, 128, 512, 1024)},
      "model": {"features": 128, "num_heads": 8},
    }
  )
  config.model.decoder_attention = attentions.layers(attention, long=True)
  return config
