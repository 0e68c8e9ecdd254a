"""Tasks: the data, vocabulary and metrics of each experiment.

`TASKS` names them for configs; a task of another project is found by its import
path. Importing this package reads no data and loads
no heavy library; TensorFlow is never imported.
"""

from collections.abc import Mapping
import types

from attention import registry
from tasks import (
  classification,
  copy,
  image,
  induction,
  listops,
  mixed,
  needle,
  pathfinder,
  recall,
  selective_copy,
  speech,
  state_tracking,
  text,
  translation,
)
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
from tasks.classification import ClassificationConfig, ClassificationTask
from tasks.copy import CopyConfig, CopyTask
from tasks.image import ImageConfig, ImageTask
from tasks.induction import InductionConfig, InductionTask
from tasks.listops import ListopsConfig, ListopsTask
from tasks.mixed import MixedConfig, MixedTask
from tasks.needle import NeedleConfig, NeedleTask
from tasks.pathfinder import PathfinderConfig, PathfinderTask
from tasks.recall import RecallConfig, RecallTask
from tasks.selective_copy import SelectiveCopyConfig, SelectiveCopyTask
from tasks.speech import SpeechConfig, SpeechTask
from tasks.state_tracking import StateTrackingConfig, StateTrackingTask
from tasks.text import TextConfig, TextTask
from tasks.translation import TranslationTask
from tasks.translation_config import TranslationConfig
from tasks.vocabularies import find as find_vocabulary

TASKS: Mapping[str, TaskEntry] = types.MappingProxyType(
  {
    "copy": TaskEntry(CopyConfig, copy.make),
    "translation": TaskEntry(TranslationConfig, translation.make),
    "text": TaskEntry(TextConfig, text.make),
    "classification": TaskEntry(ClassificationConfig, classification.make),
    "image": TaskEntry(ImageConfig, image.make),
    "speech": TaskEntry(SpeechConfig, speech.make),
    "mixed": TaskEntry(MixedConfig, mixed.make),
    "recall": TaskEntry(RecallConfig, recall.make),
    "induction": TaskEntry(InductionConfig, induction.make),
    "selective_copy": TaskEntry(SelectiveCopyConfig, selective_copy.make),
    "listops": TaskEntry(ListopsConfig, listops.make),
    "pathfinder": TaskEntry(PathfinderConfig, pathfinder.make),
    "needle": TaskEntry(NeedleConfig, needle.make),
    "state_tracking": TaskEntry(StateTrackingConfig, state_tracking.make),
  }
)


def find(name: str) -> TaskEntry:
  """The entry of a task: of `TASKS`, or of an import path.

  Args:
    name: a key of `TASKS`, or 'package.module:attribute' of a `TaskEntry`.

  Raises:
    ValueError: there is none.
  """
  entry = registry.named(name, TASKS, "entry")
  if not isinstance(entry, TaskEntry):
    raise ValueError(
      f"expected a tasks.TaskEntry, but {name} is of type {type(entry).__name__}"
    )
  return entry


__all__ = [
  "TASKS",
  "LAYOUTS",
  "Task",
  "TaskEntry",
  "Batch",
  "DecodeBatch",
  "DataError",
  "ClassificationConfig",
  "ClassificationTask",
  "CopyConfig",
  "CopyTask",
  "ImageConfig",
  "ImageTask",
  "InductionConfig",
  "InductionTask",
  "ListopsConfig",
  "ListopsTask",
  "MixedConfig",
  "MixedTask",
  "NeedleConfig",
  "NeedleTask",
  "PathfinderConfig",
  "PathfinderTask",
  "RecallConfig",
  "RecallTask",
  "SelectiveCopyConfig",
  "SelectiveCopyTask",
  "SpeechConfig",
  "SpeechTask",
  "StateTrackingConfig",
  "StateTrackingTask",
  "TextConfig",
  "TextTask",
  "TranslationConfig",
  "TranslationTask",
  "find",
  "find_vocabulary",
  "input_shapes",
  "PAD",
  "BOS",
  "EOS",
]
