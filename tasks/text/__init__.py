"""Training on a text; `model.kind` determines the objective.

A decoder predicts every token from the previous tokens, an encoder predicts masked
tokens (BERT), and an encoder-decoder predicts removed spans (T5).
"""

from collections.abc import Mapping
import pathlib
import types

from settings.errors import DataError
from tasks import base, vocabularies
from tasks.text import source, stored
from tasks.text.causal import CausalText
from tasks.text.masking import MaskedText
from tasks.text.span_corruption import SpanText
from tasks.text.task import TextConfig, TextTask

OBJECTIVES: Mapping[str, type[TextTask]] = types.MappingProxyType(
  {
    "decoder": CausalText,
    "encoder": MaskedText,
    "encoder_decoder": SpanText,
  }
)
"""Maps batch layouts to the tasks that create them."""


def make(
  config: TextConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
  also: str = "",
) -> TextTask:
  """Reads the files, and trains or opens their vocabulary; see `TaskEntry`.

  The kind of the model determines the objective. `also` is additional text for the
  vocabulary.
  """
  objective = OBJECTIVES[base.layout("text", kind, tuple(OBJECTIVES))]
  extra = objective.own_tokens(config)
  sizes = {"batch_size": batch_size, "seed": seed}
  if restore:
    vocabulary = vocabularies.restore_vocabulary(config, extra, workdir)
    return objective(config, vocabulary, None, **sizes)
  paths = source.find(config.path)
  path = paths[0] if len(paths) == 1 else config.path
  if not any(file.stat().st_size for file in paths):
    raise DataError(f"{path}: the file is empty")
  vocabulary, parts = stored.read(config, paths, extra, also, workdir)
  task = objective(config, vocabulary, parts, **sizes)
  if len(parts.train) <= task.piece:
    total = len(parts.train) + len(parts.validation)
    raise DataError(
      f"{path}: {total} {vocabulary.unit}, 90 % of them for training, are too few for "
      f"task.context={config.context}"
    )
  for split in task.eval_splits:
    count = len(task.tokens(split))
    if count < 2:
      raise DataError(
        f"{path}: empty {split} split: of its last 10 %, {len(parts.validation)} "
        f"{vocabulary.unit}, it has {count}"
      )
  return task


__all__ = ["TextConfig", "TextTask", "make"]
