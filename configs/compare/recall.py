"""Compares all causal mechanisms on associative recall, with a short convolution.

    python compare.py --config=configs/compare/recall.py --workdir=/tmp/recall
    python compare.py --config=configs/compare/recall.py --config.tasks=induction \
      --workdir=/tmp/induction
    python compare.py --config=configs/compare/recall.py \
      --config.tasks=selective_copy --workdir=/tmp/selective

Every mechanism is run with and without `model.short_convolution`, on three seeds;
results.csv has all runs and the page the better of both. The models are half as wide
as those of configs/recall.py and have one head.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  """Every mechanism that a decoder can have."""
  return ml_collections.ConfigDict(
    {
      "tasks": "recall",
      "attention": "dense,flash,sliding_window,linear,performer,window_linear,"
      "lsh,additive,multiplicative,retention,gated_linear,mamba2,delta,"
      "gated_delta,kimi_delta,differential,latent",
      "seeds": "0,1,2",
      "match_parameters": True,
      "num_steps": 800,
      "eval_every": 800,
      "grid": {
        "task": {},
        "model": {"short_convolution": (False, True)},
        "optimizer": {},
      },
      "task": {},
      "model": {"num_heads": 1, "features": 64, "mlp_features": 128},
      "optimizer": {"learning_rate": 3e-3},
    }
  )
