"""Opens, trains or restores the vocabulary of a config.

The config has the fields `vocabulary`, a `Kind`; `vocab_size`, the number of subwords
with special tokens; and `tokenizer`, which is '' or a vocabulary file or its folder, as
in `find`, and replaces the other two.
"""

from collections.abc import Iterable, Mapping, Sequence
import pathlib
import types
from typing import Any, Literal

from settings.errors import DataError
from tasks import base
from tasks.characters import Bytes, Characters, Ids
from tasks.files import read_bytes, typed_path
from tasks.tokenizer import Tokenizer, train_tokenizer

Vocabulary = Characters | Bytes | Ids | Tokenizer
Kind = Literal["characters", "bytes", "subwords"]

_KINDS: Mapping[str, type[Vocabulary]] = types.MappingProxyType(
  {
    "subwords": Tokenizer,
    "characters": Characters,
    "bytes": Bytes,
    "ids": Ids,
  }
)


def open_vocabulary(
  config: Any,
  extra: Sequence[str],
  text: str,
  training_text: str | Iterable[str],
  workdir: pathlib.Path | None,
) -> Vocabulary:
  """Trains or opens a vocabulary, which must equal that of the run in `workdir`.

  Args:
    config: config of the vocabulary.
    extra: special tokens of a new vocabulary.
    text: the complete text, for its characters.
    training_text: the text on which subwords are trained, as one string or in blocks.
    workdir: folder of a run, or None.

  Raises:
    DataError: the file is missing or is not a tokenizer, the text has too few
      subwords, or the run has another vocabulary.
  """
  if config.tokenizer:
    vocabulary = open_file(config.tokenizer, extra)
    if isinstance(vocabulary, Characters):
      vocabulary.check_knows(text)
  elif config.vocabulary == "subwords":
    vocabulary = train_tokenizer(training_text, config.vocab_size, extra)
  elif config.vocabulary == "bytes":
    vocabulary = Bytes(extra)
  elif config.vocabulary == "ids":
    vocabulary = Ids(config.vocab_size, extra)
  else:
    vocabulary = Characters(sorted(set(text)), extra)
  base.check_vocabulary(workdir, vocabulary.FILE, vocabulary.content())
  return vocabulary


def find(folder: pathlib.Path) -> pathlib.Path | None:
  """Finds the vocabulary file in a folder of weights or of a run.

  It is a `tokenizer.json`, or the `characters.json` or `bytes.json` of a run.
  """
  for directory in (folder, base.vocabulary_path(folder, "")):
    for kind in _KINDS.values():
      if (directory / kind.FILE).is_file():
        return directory / kind.FILE
  return None


def open_file(path: str, extra: Sequence[str]) -> Vocabulary:
  """Reads a vocabulary from a file, or from a folder that has one.

  Raises:
    DataError: there is no such file, or it cannot be read.
  """
  file = typed_path(path)
  if file.is_dir():
    file = find(file) or file / Tokenizer.FILE
  if not file.is_file():
    raise DataError(f"{file}: no such file (task.tokenizer)")
  kinds = {kind.FILE: kind for kind in _KINDS.values()}
  kind = kinds.get(file.name, Tokenizer)
  return kind.read(read_bytes(file), extra, str(file))


def restore_vocabulary(
  config: Any,
  extra: Sequence[str],
  workdir: pathlib.Path | None,
) -> Vocabulary:
  """Reads the vocabulary of a run, or else the config's tokenizer."""
  if workdir is None and config.tokenizer:
    return open_file(config.tokenizer, extra)
  # The tokenizer of the config may have been the `characters.json` of a run.
  file = None if workdir is None else find(workdir)
  if file is not None and file.name != Tokenizer.FILE:
    return open_file(str(file), extra)
  kind = Tokenizer if config.tokenizer else _KINDS[config.vocabulary]
  if kind is Bytes:
    return Bytes(extra)
  return kind.read(base.load_vocabulary(workdir, kind.FILE), extra, kind.FILE)


def save_vocabulary(vocabulary: Vocabulary, directory: pathlib.Path) -> None:
  """Writes the files that `restore_vocabulary` reads."""
  base.save_vocabulary(directory, {vocabulary.FILE: vocabulary.content()})
