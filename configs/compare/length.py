"""Compares mechanisms and position encodings at lengths they were not trained at.

    python compare.py --config=configs/compare/length.py --workdir=/tmp/length

Induction heads, selective copying and copying, trained at length 32 and evaluated to
256, as table 2 of Mamba (arXiv:2312.00752) and the figures of ALiBi
(arXiv:2108.12409) have it, by models of two layers with `model.short_convolution`.
`lengths-TASK` in plots/ has accuracy against length, a panel for each position encoding.
The 252 runs took two hours on one CPU core; what came out is in docs/results.md.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Exact attention, a window, and the recurrences, with six positions."""
  return experiments.comparison(
    "induction,selective_copy,duplicate",
    "dense,sliding_window,linear,mamba2,delta,gated_delta",
    num_steps=1500,
    eval_every=1500,
    checkpoint_every=1500,
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
    optimizer={"learning_rate": 5e-3, "schedule": "cosine"},
  )
