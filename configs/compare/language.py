"""Compares all causal mechanisms and two hybrids on a text, by character.

    python compare.py --config=configs/compare/language.py \
      --config.task.path=input.txt --workdir=/tmp/language

Every run is `configs/text.py`, at nanoGPT's CPU size, with `model.short_convolution`;
the hybrids have three recurrent layers for each layer of exact attention. nanoGPT's
README reports a validation loss of 1.88 on tiny Shakespeare at this size, which the
report shows. The first half of the held-out text chooses rates, and the second half is
reported; with `--config.task.test_share=0`, there is one validation text, as in
nanoGPT. A run took 2 to 12 minutes on one CPU core; docs/results.md has the results.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Every mechanism that a decoder supports, three seeds."""
  return experiments.comparison(
    "text",
    f"{experiments.CAUSAL},gated_delta_hybrid,mamba2_hybrid",
    variants={
      f"{name}_hybrid": {
        "name": name,
        "layers": f"{name},{name},{name},dense",
      }
      for name in ("gated_delta", "mamba2")
    },
    references={"text": {"nanoGPT": {"loss": 1.88}}},
    task={"path": "", "test_share": 0.5},
    model={"short_convolution": True},
  )
