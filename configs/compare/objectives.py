"""Compares mechanisms on the objectives of BERT, GPT and T5.

    python compare.py --config=configs/compare/objectives.py \
      --config.task.path=input.txt --workdir=/tmp/objectives
    python compare.py --config=configs/compare/objectives.py \
      --config.task.path=input.txt --config.tasks=bert --config.attention=dense,performer

Every run is that of `configs/bert.py`, `configs/gpt.py` or `configs/t5.py`, with the
parameter count of the dense model. For a mechanism that cannot be causal, or does not
support T5's positions, the row has the reason. This has not been run at full length
yet; the three configs state how long one run takes.
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
