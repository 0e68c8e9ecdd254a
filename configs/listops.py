"""ListOps: the value of a nested expression, as one of ten classes.

    python train.py --config=configs/listops.py:dense

configs/paper/listops.py has the size of Long Range Arena.

Nangia and Bowman, arXiv:1804.06028; Tay et al., arXiv:2011.04006.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A four-layer encoder for expressions of up to 64 tokens."""
  return experiments.training(
    num_steps=4000,
    eval_every=1000,
    task={
      "name": "listops",
      "max_depth": 4,
      "max_args": 5,
      "min_length": 8,
      "max_length": 64,
      "eval_size": 1000,
    },
    model={
      "kind": "encoder",
      "num_layers": 4,
      "num_heads": 4,
      "features": 64,
      "mlp_features": 128,
      "position": "sinusoidal",
      "encoder_attention": attentions.layers(attention),
    },
    optimizer={"b2": 0.98},
  )
