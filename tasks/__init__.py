"""Tasks: the data, vocabulary and metrics of each experiment.

`TASKS` names them for configs. Importing this package reads no data and loads
no heavy library; TensorFlow is never imported.
"""

from collections.abc import Mapping
import types

from tasks import copy, text, translation
from tasks.base import (
  BOS,
  EOS,
  PAD,
  Batch,
  DataError,
  DecodeBatch,
  Task,
  TaskEntry,
)
from tasks.copy import CopyConfig, CopyTask
from tasks.text import TextConfig, TextTask
from tasks.translation import TranslationTask
from tasks.translation_config import TranslationConfig

TASKS: Mapping[str, TaskEntry] = types.MappingProxyType(
  {
    "copy": TaskEntry(CopyConfig, copy.make),
    "translation": TaskEntry(TranslationConfig, translation.make),
    "text": TaskEntry(TextConfig, text.make),
  }
)

__all__ = [
  "TASKS",
  "Task",
  "TaskEntry",
  "Batch",
  "DecodeBatch",
  "DataError",
  "CopyConfig",
  "CopyTask",
  "TextConfig",
  "TextTask",
  "TranslationConfig",
  "TranslationTask",
  "PAD",
  "BOS",
  "EOS",
]
