"""From a comparison to its runs: which, with what, and what cannot be."""

import dataclasses
import hashlib
import importlib
import json
from typing import Any

import jax
import ml_collections

from comparison.config import Comparison, flat
import models
from training import experiment, experiment_config
from training.config import ConfigError
from training.experiment_config import ExperimentConfig

BASELINE = "dense"
"""The mechanism whose number of parameters the others are given."""


@dataclasses.dataclass(frozen=True)
class Run:
  """One run of a comparison.

  Attributes:
    task: file in configs/.
    attention: the mechanism.
    seed: of the run.
    leaves: what differs from the file's config, by leaf.
    parameters: of the model, as it runs; 0 where it cannot.
    unmatched_parameters: as its file would have it.
    obstacle: why it cannot run; empty where it can.
  """

  task: str
  attention: str
  seed: int
  leaves: dict[str, Any]
  parameters: int = 0
  unmatched_parameters: int = 0
  obstacle: str = ""

  @property
  def identity(self) -> str:
    """Folder of the run: the same for the same config, whoever asks."""
    text = json.dumps([self.task, self.attention, self.leaves], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{self.task}-{self.attention}-{self.seed}-{digest}"

  @property
  def arguments(self) -> list[str]:
    """Of `train.py`, without the folder."""
    return [
      f"--config=configs/{self.task}.py:{self.attention}",
      *(f"--config.{leaf}={value}" for leaf, value in self.leaves.items()),
    ]


def plan(comparison: Comparison) -> list[Run]:
  """Every run of a comparison, seeds last, so that all mechanisms come early.

  Nothing is trained or compiled: models are traced to count parameters.

  Raises:
    ConfigError: an override that no run can take.
  """
  leaves = flat(comparison.overrides)
  runs = []
  for task in comparison.task_names:
    target = None
    if comparison.match_parameters:
      target = _count(_parse(task, BASELINE, leaves))
    for attention in comparison.mechanisms:
      runs.append(_planned(task, attention, leaves, target))
  return [
    dataclasses.replace(run, seed=seed, leaves={"seed": seed, **run.leaves})
    for seed in comparison.seed_numbers
    for run in runs
  ]


def _planned(
  task: str, attention: str, leaves: dict[str, Any], target: int | None
) -> Run:
  """A run without its seed, its parameters matched where there is a target."""
  run = Run(task, attention, 0, dict(leaves))
  # What cannot be with dense attention either is a fault of the comparison.
  if attention != BASELINE:
    _parse(task, BASELINE, leaves)
  try:
    config = _parse(task, attention, leaves)
    count = _count(config)
  except (ConfigError, ValueError) as error:
    return dataclasses.replace(run, obstacle=str(error))
  matched = count
  if target is not None:
    width = _width(config)
    wider = _count(_parse(task, attention, _wide(leaves, width + 1)))
    # The count is linear in the width: one more unit tells its price.
    width = max(1, width + round((target - count) / (wider - count)))
    if width != _width(config):
      run = dataclasses.replace(run, leaves=_wide(leaves, width))
      matched = _count(_parse(task, attention, run.leaves))
  return dataclasses.replace(
    run, parameters=matched, unmatched_parameters=count
  )


def _width(config: ExperimentConfig) -> int:
  if not isinstance(config.model, models.ModelConfig):
    raise ConfigError(
      f"config.match_parameters: a model of kind {config.model.kind!r} has no "
      "feed-forward layers to widen; expected False"
    )
  return config.model.mlp_features


def _wide(leaves: dict[str, Any], width: int) -> dict[str, Any]:
  return {**leaves, "model.mlp_features": width}


def _parse(
  task: str, attention: str, leaves: dict[str, Any]
) -> ExperimentConfig:
  """The config that `train.py` would make of the same arguments."""
  file = importlib.import_module(f"configs.{task}")
  config: ml_collections.ConfigDict = file.get_config(attention)
  with config.unlocked():
    for leaf, value in leaves.items():
      config.update_from_flattened_dict({leaf: value})
  return experiment_config.parse(config.to_dict())


def _count(config: ExperimentConfig) -> int:
  shapes = experiment.create(config).shapes
  return sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
