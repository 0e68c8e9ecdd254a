"""Compares all causal mechanisms on associative recall, with a short convolution.

    python compare.py --config=configs/compare/recall.py --workdir=/tmp/recall

Every mechanism has one row with `model.short_convolution` and one row without it, with
three seeds. The models are half as wide as in configs/recall.py and have one head.
configs/compare/short_convolution.py has tuned rates, and configs/compare/capacity.py has
more pairs and three widths.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Every mechanism that a decoder supports."""
  return experiments.comparison(
    "recall",
    "dense,flash,sliding_window,linear,performer,window_linear,"
    "lsh,additive,multiplicative,retention,gated_linear,mamba2,delta,"
    "gated_delta,kimi_delta,differential,latent",
    num_steps=800,
    eval_every=80,
    across={"model": {"short_convolution": (False, True)}},
    model={"num_heads": 1, "features": 64, "mlp_features": 128},
    optimizer={"learning_rate": 3e-3},
  )
