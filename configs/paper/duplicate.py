"""Duplication, `0w0w`, at the size of the Reformer paper.

    python train.py --config=configs/paper/duplicate.py:lsh

w has 511 symbols, so a sequence has 1,024 tokens; the model has one layer. It has not
been run at full length; benchmarks/reformer_duplication.md has a shorter run.

Kitaev et al., Reformer, section 5 and table 2, arXiv:2001.04451.
"""

import ml_collections

from configs import attentions, duplicate


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A one-layer decoder that has to find each symbol 512 positions before."""
  config = duplicate.get_config(attention)
  config.update(
    {
      "num_steps": 150000,
      "eval_every": 10000,
      "checkpoint_every": 10000,
      "task": {"vocab_size": 127, "min_length": 511, "max_length": 511},
      "model": {"num_layers": 1, "features": 256, "num_heads": 4},
    }
  )
  config.model.decoder_attention = attentions.layers(attention, long=True)
  return config
