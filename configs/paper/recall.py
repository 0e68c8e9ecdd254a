"""Multi-query associative recall at the size of the Zoology paper.

    python train.py --config=configs/paper/recall.py:dense

Sequences have 256 positions and 16 pairs, the longest of the paper's three settings.
The others are `--config.task.length=64 --config.task.num_pairs=4`, and 128 positions
with 8 pairs, both in batches of 512. The paper reports the best of learning rates from
1e-4 to 1e-2 for widths of 64 to 512; unlike this model, its models have no feed-forward
layers. It has not been run at full length.

Arora et al., Zoology, appendix E, arXiv:2312.04927.
"""

import ml_collections

from configs import attentions, recall


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """A two-layer decoder with one head, for 16 pairs of 8,192 symbols."""
  config = recall.get_config(attention)
  config.update(
    {
      # 64 epochs of 100,000 examples.
      "num_steps": 25000,
      "batch_size": 256,
      "eval_every": 1000,
      "checkpoint_every": 1000,
      "task": {
        "vocab_size": 8192,
        "length": 256,
        "num_pairs": 16,
        "train_size": 100000,
        "eval_size": 3000,
      },
      "model": {"position": "learned"},
      "optimizer": {"weight_decay": 0.1},
    }
  )
  config.model.decoder_attention = attentions.layers(attention, long=True)
  return config
