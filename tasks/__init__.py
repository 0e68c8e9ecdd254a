"""Tasks: the data, vocabulary and metrics of each experiment.

`TASKS` names the tasks for configs. A task of another project is named by its import
path. Importing this package reads no data and imports no task; a task is imported
when it is looked up. TensorFlow is never imported.
"""

from collections.abc import Mapping

from attention.names import resolve
from settings.import_paths import ImportPaths, registered
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
from tasks.vocabularies import find as find_vocabulary

TASKS: Mapping[str, TaskEntry] = ImportPaths(
  {
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
  },
  lambda module, config: TaskEntry(getattr(module, config), module.make),
)
"""Maps the name of a task to its config type and its `make` function."""


def find(name: str) -> TaskEntry:
  """Finds a task by its name in `TASKS` or by its import path.

  Args:
    name: a key of `TASKS`, or 'package.module:attribute' of a `TaskEntry`.

  Raises:
    ValueError: there is no such task.
  """
  entry = resolve(name, TASKS, "entry")
  if not isinstance(entry, TaskEntry):
    raise ValueError(
      f"expected a tasks.TaskEntry, but {name} is of type {type(entry).__name__}"
    )
  return entry


__all__ = [
  "TASKS",
  "Task",
  "TaskEntry",
  "Batch",
  "DecodeBatch",
  "DataError",
  "LayoutError",
  "find",
  "find_vocabulary",
  "input_shapes",
  "PAD",
  "BOS",
  "EOS",
]
