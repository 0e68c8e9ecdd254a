"""Multi-query associative recall: looks up many values by their keys.

    python train.py --config=configs/recall.py:dense

With dense attention all values of 1,000 held-out sequences came out right after
2,000 steps, 99.6 % of them at step 1,000; 4.4 minutes on 2 CPU cores that other
jobs shared. configs/paper/recall.py has the paper's size.

Arora et al., Zoology, arXiv:2312.04927.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A decoder of two layers with one head, on 4 pairs in 64 places."""
  return experiments.training(
    num_steps=2000,
    eval_every=500,
    task={
      "name": "recall",
      "vocab_size": 64,
      "length": 64,
      "num_pairs": 4,
      "eval_size": 1000,
    },
    model={
      "kind": "decoder",
      "num_layers": 2,
      "num_heads": 1,
      "features": 128,
      "mlp_features": 256,
      "position": "rotary",
      "decoder_attention": attentions.layers(attention),
    },
    optimizer={"b2": 0.98},
  )
