"""Compares all causal mechanisms on induction heads and selective copying.

    python compare.py --config=configs/compare/selective.py --workdir=/tmp/selective

Two layers of width 32 with rotary positions, trained at length 32 and evaluated to
256; every mechanism is a row with and one without `model.short_convolution`, of three
seeds. `lengths-TASK` in plots/ has accuracy against length.
"""

import ml_collections

from configs import experiments

_LENGTHS = {"length": 32, "eval_lengths": (64, 128, 256)}


def get_config() -> ml_collections.ConfigDict:
  """Every mechanism that a decoder can have."""
  return experiments.comparison(
    "induction,selective_copy",
    "dense,flash,sliding_window,linear,performer,window_linear,"
    "lsh,additive,multiplicative,retention,gated_linear,mamba2,delta,"
    "gated_delta,kimi_delta,differential,latent",
    num_steps=1000,
    eval_every=1000,
    checkpoint_every=1000,
    across={"model": {"short_convolution": (False, True)}},
    task={**_LENGTHS, "eval_size": 500},
    model={"num_heads": 2, "features": 32, "mlp_features": 64},
    optimizer={"learning_rate": 5e-3, "schedule": "cosine"},
  )
