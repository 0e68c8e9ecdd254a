"""Tasks: the data, vocabulary and metrics of each experiment.

`TASKS` names them for configs; a task of another project is found by its import
path. Importing this package reads no data and imports no task: that is done where
one is asked for. TensorFlow is never imported.
"""

from collections.abc import Iterator, Mapping
import importlib
from typing import Any

from tasks.base import (
  BOS,
  EOS,
  LAYOUTS,
  PAD,
  Batch,
  DataError,
  DecodeBatch,
  Task,
  TaskEntry,
  input_shapes,
)

_CONFIGS = {
  "copy": "CopyConfig",
  "translation": "TranslationConfig",
  "text": "TextConfig",
  "classification": "ClassificationConfig",
  "image": "ImageConfig",
  "speech": "SpeechConfig",
  "mixed": "MixedConfig",
  "recall": "RecallConfig",
  "induction": "InductionConfig",
  "selective_copy": "SelectiveCopyConfig",
  "listops": "ListopsConfig",
  "pathfinder": "PathfinderConfig",
  "needle": "NeedleConfig",
  "state_tracking": "StateTrackingConfig",
}
"""Name of a task, and of its module -> the config there, beside its `make`."""


class _Entries(Mapping[str, TaskEntry]):
  """The tasks by name, each of which is imported where it is asked for."""

  def __getitem__(self, name: str) -> TaskEntry:
    config = _CONFIGS[name]
    module = importlib.import_module(f"tasks.{name}")
    return TaskEntry(getattr(module, config), module.make)

  def __iter__(self) -> Iterator[str]:
    return iter(_CONFIGS)

  def __len__(self) -> int:
    return len(_CONFIGS)


TASKS: Mapping[str, TaskEntry] = _Entries()


def find(name: str) -> TaskEntry:
  """The entry of a task: of `TASKS`, or of an import path.

  Args:
    name: a key of `TASKS`, or 'package.module:attribute' of a `TaskEntry`.

  Raises:
    ValueError: there is none.
  """
  # JAX is imported with it, which a list of names has not to wait for.
  from attention import registry

  entry = registry.named(name, TASKS, "entry")
  if not isinstance(entry, TaskEntry):
    raise ValueError(
      f"expected a tasks.TaskEntry, but {name} is of type {type(entry).__name__}"
    )
  return entry


def __getattr__(name: str) -> Any:
  # `tasks.CopyConfig` and `tasks.CopyTask`.
  for module, config in _CONFIGS.items():
    if name in (config, config.removesuffix("Config") + "Task"):
      return getattr(importlib.import_module(f"tasks.{module}"), name)
  if name == "find_vocabulary":
    return importlib.import_module("tasks.vocabularies").find
  raise AttributeError(f"module 'tasks' has no attribute {name!r}")


__all__ = [
  "TASKS",
  "LAYOUTS",
  "Task",
  "TaskEntry",
  "Batch",
  "DecodeBatch",
  "DataError",
  "find",
  "input_shapes",
  "PAD",
  "BOS",
  "EOS",
]
