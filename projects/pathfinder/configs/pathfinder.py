"""Pathfinder: whether two discs are on one dashed path, as a sequence of pixels.

    python train.py --config=configs/pathfinder.py:dense

The model reads 32 × 32 pixels, as in Long Range Arena. This needs a GPU: each of the
20,000 steps takes 20 s on a CPU core. It has not been run at full length. A rule that
uses only the discs is right in 50 % of the pictures, and a rule that also uses where
paths leave them in 63 %.

Linsley et al., arXiv:1805.08315; Tay et al., arXiv:2011.04006.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """An encoder of four layers with learned positions, on 1,024 pixels."""
  return experiments.training(
    num_steps=20000,
    eval_every=1000,
    task={
      "name": "pathfinder",
      "size": 32,
      "num_dashes": 6,
      "num_distractors": 6,
      "eval_size": 2000,
    },
    model={
      "kind": "encoder",
      "num_layers": 4,
      "num_heads": 4,
      "features": 64,
      "mlp_features": 128,
      "position": "learned",
      "encoder_attention": attentions.layers(attention, long=True),
    },
    optimizer={"warmup_steps": 500, "b2": 0.98},
  )
