"""Compares mechanisms and position encodings beyond the trained length.

    python compare.py --config=configs/compare/length.py --workdir=/tmp/length

The tasks are induction heads, selective copying and copying. Two-layer models with
`model.short_convolution` are trained at length 32 and evaluated up to length 256, as in
table 2 of Mamba (arXiv:2312.00752) and the figures of ALiBi (arXiv:2108.12409). For
every row, four seeds choose one of three learning rates, and eight others are reported.
`lengths-TASK` in plots/ shows accuracy against length, one panel per position encoding.
For the results in docs/results.md, two seeds halved the rates twice
(`--config.halving.rungs=0.25,0.5 --config.halving.seeds=2`): a row took 4 to 10
minutes on one CPU core.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Exact attention, a window, and the recurrences, with six positions."""
  return experiments.comparison(
    "induction,selective_copy,duplicate",
    "dense,sliding_window,linear,mamba2,delta,gated_delta",
    seeds=experiments.EIGHT,
    num_steps=1500,
    eval_every=75,
    checkpoint_every=750,
    across={
      "model": {
        "position": (
          "none",
          "sinusoidal",
          "learned",
          "rotary",
          "t5",
          "alibi",
        )
      }
    },
    grid={"optimizer": {"learning_rate": (1.5e-3, 5e-3, 1.5e-2)}},
    halving={"rungs": (), "seeds": 4},
    per_task={
      "induction": {"task": {"length": 32, "eval_lengths": (64, 128, 256)}},
      "selective_copy": {
        "task": {"length": 32, "eval_lengths": (64, 128, 256)}
      },
      "duplicate": {
        "task": {
          "kind": "copy",
          "vocab_size": 16,
          "min_length": 16,
          "max_length": 16,
          "eval_lengths": (32, 64, 128),
        }
      },
    },
    task={"eval_size": 500},
    model={
      "num_heads": 2,
      "features": 32,
      "mlp_features": 64,
      "short_convolution": True,
    },
    optimizer={"schedule": "cosine"},
  )
