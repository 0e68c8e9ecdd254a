"""A needle in a haystack: one value, at several depths and lengths.

    python train.py --config=configs/needle.py:dense

The metrics are 'accuracy_depth_0' (the needle comes first) to 'accuracy_depth_100'
(last), at the trained length and, in the splits 'length_…', at other lengths. The
original tests pretrained language models with up to 128,000 tokens.
configs/paper/needle.py has longer sequences; both configs train from scratch.

Kamradt, Needle In A Haystack (2023); Hsieh et al., RULER, arXiv:2404.06654.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder that looks up one of four pairs in 64 positions."""
  return experiments.training(
    num_steps=3000,
    eval_every=750,
    task={
      "name": "needle",
      "length": 64,
      "eval_lengths": (128, 256),
      "num_depths": 5,
      "num_distractors": 3,
      "num_keys": 32,
      "num_values": 32,
      "num_fillers": 32,
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
    optimizer={"b2": 0.98},
  )
