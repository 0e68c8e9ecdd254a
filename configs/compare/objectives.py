"""Compares mechanisms on the objectives of BERT, GPT and T5.

    python compare.py --config=configs/compare/objectives.py \
      --config.task.path=input.txt --workdir=/tmp/objectives
    python compare.py --config=configs/compare/objectives.py \
      --config.task.path=input.txt --config.tasks=bert --config.attention=dense,performer

Every run is that of `configs/bert.py`, `configs/gpt.py` or `configs/t5.py`, at
the parameters of the dense model. A mechanism that cannot be causal, or cannot
carry T5's positions, is a row that says so. It has not been run at full length
yet: one run takes the minutes that its config tells.
"""

import ml_collections

from configs import experiments


def get_config() -> ml_collections.ConfigDict:
  """Three objectives on one text."""
  return experiments.comparison(
    "bert,gpt,t5",
    "all",
    seeds="0",
    task={"path": ""},
  )
