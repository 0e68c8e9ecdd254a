"""The config fields that all configs share."""

from collections.abc import Mapping
from typing import Any

import ml_collections

EIGHT = "0,1,2,3,4,5,6,7"
"""Seeds of a comparison that counts the seeds that solved a task."""

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
  """A run of `train.py`: AdamW with a warm-up and clipped gradients.

  Args:
    task: fields of the task.
    model: fields of the model.
    optimizer: fields that add to or replace those of every config.
    num_steps: number of training steps.
    eval_every: steps between evaluations.
    checkpoint_every: steps between checkpoints; 0 is `eval_every`.
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
  tasks: str, attention: str, *, seeds: str = "0,1,2", **leaves: Any
) -> ml_collections.ConfigDict:
  """A comparison of `compare.py` at equal parameters.

  Args:
    tasks: names of configs, with commas between.
    attention: names of mechanisms, likewise, or 'all'.
    seeds: of every row.
    **leaves: what else all runs have; a section `across` or `grid` takes some of
      'task', 'model' and 'optimizer'.
  """
  for name in ("across", "grid"):
    leaves[name] = _sections() | leaves.get(name, {})
  return ml_collections.ConfigDict(
    {
      "tasks": tasks,
      "attention": attention,
      "seeds": seeds,
      "match_parameters": True,
      **_sections(),
      **leaves,
    }
  )


def _sections() -> dict[str, Any]:
  """Of leaves, empty ones that the command line fills."""
  return {"task": {}, "model": {}, "optimizer": {}}
