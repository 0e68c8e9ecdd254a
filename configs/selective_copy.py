"""Selective copying: reproduces the marked symbols without the noise.

    python train.py --config=configs/selective_copy.py:dense

`--config.task.eval_lengths=128,256` also evaluates at other lengths, in the splits
'length_128' and 'length_256'.

configs/paper/selective_copy.py has the size of the Mamba paper.

Jing et al., arXiv:1706.02761; Gu and Dao, Mamba, section 4.1.1 and appendix
E.1, arXiv:2312.00752.
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder that remembers 4 symbols among 64 positions."""
  return experiments.training(
    num_steps=4000,
    eval_every=1000,
    task={
      "name": "selective_copy",
      "vocab_size": 16,
      "length": 64,
      "num_tokens": 4,
      "eval_lengths": (),
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
