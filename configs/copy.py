"""Copies sequences of symbols: the smallest test of whether a mechanism learns.

    python train.py --config=configs/copy.py:dense

Held-out sequences that come out exactly are 'exact_match' in the result: all
1,000 of them with each of dense, sliding_window, performer and linformer, on 2
CPU cores in 1.7 minutes (dense) to 6.1 (performer, which shared the cores).
`--config.task.kind=reverse` reverses them instead. With
`--config.task.eval_lengths=32,64` those of exactly 32 and 64 symbols are the
splits 'length_32' and 'length_64', which are not generated: their
'sequence_accuracy' is the share that would come out exactly.

A decoder alone does the same with

    python train.py --config=configs/duplicate.py:dense --config.task.kind=copy
"""

import ml_collections

from configs import attentions, experiments


def get_config(attention: str = "dense") -> ml_collections.ConfigDict:
  """An encoder-decoder of two layers, on sequences of up to 16 symbols."""
  return experiments.training(
    num_steps=1200,
    eval_every=400,
    task={
      "name": "copy",
      "kind": "copy",
      "vocab_size": 32,
      "min_length": 1,
      "max_length": 16,
      "eval_lengths": (),
      "eval_size": 1000,
    },
    model={
      "kind": "encoder_decoder",
      "num_layers": 2,
      "num_heads": 4,
      "features": 128,
      "mlp_features": 256,
      **attentions.choose(attention),
    },
    optimizer={"b2": 0.98},
  )
