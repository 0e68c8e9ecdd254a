"""Duplicates sequences with a decoder-only model: `0w0w` of the Reformer paper.

    python train.py --config=configs/duplicate.py:dense

Only the second half has a loss; each of its symbols repeats the symbol len(w) + 1
positions earlier. configs/paper/duplicate.py has the paper's size.

Kitaev et al., Reformer, section 4, arXiv:2001.04451.
"""

import ml_collections

from configs import attentions, copy


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """`configs/copy.py` with a decoder-only model."""
  config = copy.get_config("dense")
  config.task.kind = "duplicate"
  config.model.kind = "decoder"
  for field in ("encoder_attention", "decoder_attention", "cross_attention"):
    del config.model[field]
  config.model.decoder_attention = attentions.layers(attention)
  return config
