"""Copies sequences of symbols: the smallest test of whether a mechanism learns.

    python train.py --config=configs/copy.py:dense

'exact_match' is the share of held-out sequences that are copied exactly: all 1,000
with dense, sliding_window, performer and linformer, in 1.7 minutes (dense) to 6.1
minutes (performer, which shared the cores) on 2 CPU cores.
`--config.task.kind=reverse` reverses the sequences instead. With
`--config.task.eval_lengths=32,64`, the splits 'length_32' and 'length_64' have
sequences of exactly 32 and 64 symbols. They are not decoded: their
'sequence_accuracy' is the share that greedy decoding would copy exactly.

The same task for a decoder-only model:

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
