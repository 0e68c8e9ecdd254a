"""ListOps at the size of Long Range Arena.

    python train.py --config=configs/paper/listops.py:dense

Expressions have 501 to 1,999 tokens and one of ten values. It has not been run at full
length.

Tay et al., Long Range Arena, section 3.1 and appendix A.1, arXiv:2011.04006.
"""

import ml_collections

from configs import attentions, listops


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A six-layer encoder for expressions of up to 1,999 tokens."""
  config = listops.get_config(attention)
  config.update(
    {
      "num_steps": 5000,
      "batch_size": 32,
      "task": {
        "min_length": 501,
        "max_length": 1999,
        "max_depth": 10,
        "max_args": 10,
        "train_size": 96000,
        "eval_size": 2000,
      },
      "model": {
        "num_layers": 6,
        "features": 512,
        "num_heads": 8,
        "mlp_features": 2048,
      },
      "optimizer": {"weight_decay": 0.1},
    }
  )
  config.model.encoder_attention = attentions.layers(attention, long=True)
  return config
