"""Tasks: the data, vocabulary and metrics of each experiment.

`TASKS` names them for configs; a task of another project is found by its import
path. Importing this package reads no data and imports no task: that is done where
one is asked for. TensorFlow is never imported.
"""

from collections.abc import Mapping
from typing import Any

from settings.import_paths import ImportPaths, load, registered
from tasks.base import (
  BOS,
  EOS,
  PAD,
  Batch,
  DataError,
  DecodeBatch,
  LayoutError,
  Task,
  TaskEntry,
  input_shapes,
)

_PATHS = {
  "copy": "tasks.copy:CopyConfig",
  "translation": "tasks.translation:TranslationConfig",
  "text": "tasks.text:TextConfig",
  "classification": "tasks.classification:ClassificationConfig",
  "recall": "tasks.recall:RecallConfig",
  "induction": "tasks.induction:InductionConfig",
  "selective_copy": "tasks.selective_copy:SelectiveCopyConfig",
  "listops": "tasks.listops:ListopsConfig",
  "needle": "tasks.needle:NeedleConfig",
  "state_tracking": "tasks.state_tracking:StateTrackingConfig",
  **registered("TASKS"),
}
"""Name of a task -> where its config is, beside its `make`."""


TASKS: Mapping[str, TaskEntry] = ImportPaths(
  _PATHS, lambda module, config: TaskEntry(getattr(module, config), module.make)
)


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
  for path in _PATHS.values():
    module, _, config = path.partition(":")
    if name in (config, config.removesuffix("Config") + "Task"):
      return load(f"{module}:{name}")
  if name == "find_vocabulary":
    return load("tasks.vocabularies:find")
  raise AttributeError(f"module 'tasks' has no attribute {name!r}")


__all__ = [
  "TASKS",
  "Task",
  "TaskEntry",
  "Batch",
  "DecodeBatch",
  "DataError",
  "LayoutError",
  "find",
  "input_shapes",
  "PAD",
  "BOS",
  "EOS",
]
