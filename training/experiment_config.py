"""A whole config: the loop, the optimiser, the task and the model.

Imports JAX, as every config does, but neither Flax nor Optax.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import models
from process.errors import ConfigError
from settings.build import build, to_mapping
from settings.suggest import one_of
import tasks
from training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """A whole config, validated.

  Attributes:
    train: the loop and the optimiser.
    task_name: key of `tasks.TASKS`.
    task: an instance of that task's `config_type`.
    model: what `models.create` wants to know.
  """

  train: TrainConfig
  task_name: str
  task: Any
  model: models.ModelConfig | models.Seq2SeqConfig

  def to_mapping(self) -> dict[str, Any]:
    """JSON-ready, every default filled in; `parse` inverts it."""
    return {
      **to_mapping(self.train),
      "task": {"name": self.task_name, **to_mapping(self.task)},
      "model": to_mapping(self.model),
    }


def parse(mapping: Mapping[str, Any]) -> ExperimentConfig:
  """Validates a config, a ConfigDict or parsed JSON, without reading data.

  'slots' is what `workdir.write_config` adds for a reader; it may be there where
  it says what the model says.

  Raises:
    ConfigError: the first fault found.
  """
  leaves = dict(mapping.items())
  told = leaves.pop("slots", None)
  sections = {}
  for section in ("task", "model"):
    if section not in leaves:
      # A misspelt section is an unknown key; this names it.
      build(TrainConfig, leaves)
      raise ConfigError(f"config.{section}: missing, and it has no default")
    sections[section] = leaves.pop(section)
  train = build(TrainConfig, leaves)
  task_leaves = dict(sections["task"].items())
  name = task_leaves.pop("name", None)
  if name not in tasks.TASKS:
    raise ConfigError(f"config.task.name: {one_of(name, tasks.TASKS)}")
  model = _build_model(sections["model"])
  if told not in (None, models.slots(model)):
    raise ConfigError(
      f"config.slots: the model has {models.slots(model)!r}, got {told!r}; "
      "choose a mechanism by config.model"
    )
  return ExperimentConfig(
    train=train,
    task_name=name,
    task=build(tasks.TASKS[name].config_type, task_leaves, "config.task"),
    model=model,
  )


def _build_model(leaves: Any) -> Any:
  """The config of the model, of the type that its kind has."""
  config_type = models.ModelConfig  # Tells what is missing where no kind is.
  if hasattr(leaves, "get") and "kind" in leaves:
    kind = leaves["kind"]
    if not isinstance(kind, str) or kind not in models.CONFIGS:
      raise ConfigError(f"config.model.kind: {one_of(kind, models.CONFIGS)}")
    config_type = models.CONFIGS[kind]
  return build(config_type, leaves, "config.model")
