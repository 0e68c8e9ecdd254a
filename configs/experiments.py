"""The fields that all configs share."""

from collections.abc import Mapping
from typing import Any

import ml_collections

EIGHT = "0,1,2,3,4,5,6,7"
"""Seeds of a comparison on an all-or-nothing task."""

CAUSAL = (
  "dense,sliding_window,linear,performer,window_linear,"
  "retention,gated_linear,mamba2,delta,gated_delta,kimi_delta,"
  "lsh,additive,multiplicative,differential,latent,"
  "lightning,mamba3,comba,gated_delta_2,delta_product,rwkv7,mesa,log_linear,"
  "stick_breaking,path,mamba,rg_lru,mlstm,hgrn2,rwkv6,gsa,precond_delta,"
  "gka,momentum_delta,ttt_linear,titans"
)
"""Mechanisms for a decoder, except those that need long sequences."""


def training(
  *,
  task: Mapping[str, Any],
  model: Mapping[str, Any],
  optimizer: Mapping[str, Any],
  num_steps: int,
  eval_every: int,
  checkpoint_every: int = 0,
  batch_size: int = 64,
  log_every: int = 50,
) -> ml_collections.ConfigDict:
  """Returns the config of a run of `train.py`: AdamW, warm-up, clipped gradients.

  Args:
    task: fields of the task.
    model: fields of the model.
    optimizer: fields that extend or replace the shared ones.
    num_steps: number of training steps.
    eval_every: steps between evaluations.
    checkpoint_every: steps between checkpoints; 0 means `eval_every`.
    batch_size: examples per step.
    log_every: steps between logged lines.
  """
  return ml_collections.ConfigDict(
    {
      "seed": 0,
      "num_steps": num_steps,
      "batch_size": batch_size,
      "eval_every": eval_every,
      "checkpoint_every": checkpoint_every or eval_every,
      "log_every": log_every,
      "parallel": "jit",
      "decode_method": "greedy",
      "task": dict(task),
      "model": dict(model),
      "optimizer": {
        "name": "adamw",
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup_steps": 100,
        "weight_decay": 0.0,
        "clip_norm": 1.0,
        **optimizer,
      },
    }
  )


def comparison(
  tasks: str, attention: str, *, seeds: str = "0,1,2", **fields: Any
) -> ml_collections.ConfigDict:
  """Returns the config of a comparison at equal parameter counts.

  Args:
    tasks: names of configs, separated by commas.
    attention: names of mechanisms, separated by commas, or 'all'.
    seeds: seeds of every row, separated by commas.
    **fields: further config fields of all runs; the sections `across` and `grid` may
      have the sections 'task', 'model' and 'optimizer'.
  """
  for name in ("across", "grid"):
    fields[name] = _sections() | fields.get(name, {})
  return ml_collections.ConfigDict(
    {
      "tasks": tasks,
      "attention": attention,
      "seeds": seeds,
      "match_parameters": True,
      **_sections(),
      **fields,
    }
  )


def _sections() -> dict[str, Any]:
  """Returns empty sections, whose fields the command line can set."""
  return {"task": {}, "model": {}, "optimizer": {}}
