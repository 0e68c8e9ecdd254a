"""A needle in 4,096 positions, at several depths and lengths.

    python train.py --config=configs/paper/needle.py:sliding_window

The original tests pretrained language models with up to 128,000 tokens. This model is
trained from scratch and evaluated at lengths of 1,024 to 8,192, at 11 depths each. It
has not been run at full length.

Kamradt, Needle In A Haystack (2023); Hsieh et al., RULER, arXiv:2404.06654.
"""

import ml_collections

from configs import attentions, needle


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder that looks up one of four pairs in 4,096 positions."""
  config = needle.get_config(attention)
  config.update(
    {
      "num_steps": 20000,
      "batch_size": 16,
      "eval_every": 2000,
      "checkpoint_every": 2000,
      "task": {
        "length": 4096,
        "eval_lengths": (1024, 2048, 8192),
        "num_depths": 11,
      },
    }
  )
  config.model.decoder_attention = attentions.layers(attention, long=True)
  return config
