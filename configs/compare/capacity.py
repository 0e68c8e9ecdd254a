"""Compares recall and memory of all causal mechanisms.

    python compare.py --config=configs/compare/capacity.py --workdir=/tmp/capacity

This is figure 2 of Zoology (Arora et al., arXiv:2312.04927) at a size for 2 CPU cores:
associative recall of 16 pairs in 64 positions, with two layers of width 16, 32 and 64,
one head and `model.short_convolution`. For every row, four seeds trained for all steps
choose one of five learning rates, and eight other seeds are reported. For the results in
docs/results.md, two seeds halved the rates twice (`--config.halving.rungs=0.25,0.5
--config.halving.seeds=2`), which takes half as many steps: a row of width 64 took 6
to 18 minutes on one busy core (`--config.across.model.features="(64,)"`). Halving
stopped rates that solve the task later.

`capacity-recall` in plots/ shows accuracy against the bytes of cache and state at the
end of a sequence. `capacity_sizes.py` varies windows, features and heads;
`short_convolution.py` removes the convolution.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Every mechanism that a decoder supports, at three widths."""
  return experiments.comparison(
    "recall",
    experiments.CAUSAL,
    seeds=experiments.EIGHT,
    num_steps=1200,
    batch_size=32,
    eval_every=100,
    checkpoint_every=600,
    across={"model": {"features": (16, 32, 64), "short_convolution": (True,)}},
    grid={"optimizer": {"learning_rate": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}},
    halving={"rungs": (), "seeds": 4},
    task={"num_pairs": 16, "length": 64},
    model={"num_heads": 1, "mlp_features": 64},
  )
