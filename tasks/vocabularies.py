"""The vocabulary that a config asks for: made, opened or restored."""

from collections.abc import Sequence
import pathlib
from typing import Literal, Protocol

from tasks import base
from tasks.base import DataError
from tasks.characters import FILE as CHARACTERS_FILE
from tasks.characters import Characters, open_characters
from tasks.files import typed_path
from tasks.tokenizer import FILE as TOKENIZER_FILE
from tasks.tokenizer import Tokenizer, open_tokenizer, train_tokenizer
from tasks.utf8 import FILE as BYTES_FILE
from tasks.utf8 import Bytes, open_bytes

Vocabulary = Characters | Bytes | Tokenizer
Kind = Literal["characters", "bytes", "subwords"]


class VocabularyLeaves(Protocol):
  """The leaves of a task that say which vocabulary it has."""

  @property
  def vocabulary(self) -> Kind:
    """'characters', 'bytes', or 'subwords', which are trained on the text."""
    ...

  @property
  def vocab_size(self) -> int:
    """Subwords, special tokens included."""
    ...

  @property
  def tokenizer(self) -> str:
    """A file as `find` finds, or its folder, in place of the other two; or ''."""
    ...


def symbols(config: VocabularyLeaves) -> dict[str, int]:
  """Leaf -> how many ids it asks for; empty where data decide that."""
  is_trained = config.vocabulary == "subwords" and not config.tokenizer
  return {"vocab_size": config.vocab_size} if is_trained else {}


def open_vocabulary(
  config: VocabularyLeaves,
  extra: Sequence[str],
  text: str,
  training_text: str,
  workdir: pathlib.Path | None,
) -> Vocabulary:
  """Makes or opens a vocabulary; that of a run must be the same.

  Args:
    config: which one.
    extra: special tokens of a vocabulary that is made here.
    text: all of it, for its characters.
    training_text: what subwords are trained on.
    workdir: of a run, or None.

  Raises:
    DataError: a file that is missing or is not a tokenizer, a number of
      subwords that the text does not have, or a run with another vocabulary.
  """
  if config.tokenizer:
    vocabulary = open_file(config.tokenizer, extra)
    if isinstance(vocabulary, Characters):
      vocabulary.check_knows(text)
  elif config.vocabulary == "subwords":
    vocabulary = train_tokenizer(training_text, config.vocab_size, extra)
  elif config.vocabulary == "bytes":
    vocabulary = Bytes(extra)
  else:
    vocabulary = Characters(sorted(set(text)), extra)
  base.check_vocabulary(workdir, _name(vocabulary), vocabulary.content())
  return vocabulary


def find(folder: pathlib.Path) -> pathlib.Path | None:
  """The file of a vocabulary in a folder of weights, or in that of a run.

  It is a `tokenizer.json`, or the `characters.json` or `bytes.json` of a run.
  """
  for place in (folder, base.vocabulary_path(folder, "")):
    for name in (TOKENIZER_FILE, CHARACTERS_FILE, BYTES_FILE):
      if (place / name).is_file():
        return place / name
  return None


def open_file(path: str, extra: Sequence[str]) -> Vocabulary:
  """Reads a vocabulary from a file, or from a folder that has one.

  Raises:
    DataError: there is none, or it cannot be read.
  """
  file = typed_path(path)
  if file.is_dir():
    file = find(file) or file / TOKENIZER_FILE
  if not file.is_file():
    raise DataError(f"{file}: no such file (task.tokenizer)")
  if file.name == CHARACTERS_FILE:
    return open_characters(file, extra)
  if file.name == BYTES_FILE:
    return open_bytes(file, extra)
  return open_tokenizer(file)


def restore_vocabulary(
  config: VocabularyLeaves,
  extra: Sequence[str],
  workdir: pathlib.Path | None,
) -> Vocabulary:
  """Reads the vocabulary of a run; without one, the tokenizer of the config."""
  if workdir is None and config.tokenizer:
    return open_file(config.tokenizer, extra)
  # A tokenizer that the config names may have been the characters of a run.
  file = None if workdir is None else find(workdir)
  if file is not None and file.name in (CHARACTERS_FILE, BYTES_FILE):
    return open_file(str(file), extra)
  if config.tokenizer or config.vocabulary == "subwords":
    return Tokenizer.load(workdir)
  if config.vocabulary == "bytes":
    return Bytes(extra)
  return Characters.load(workdir, extra)


def save_vocabulary(vocabulary: Vocabulary, directory: pathlib.Path) -> None:
  """Writes what `restore_vocabulary` reads."""
  base.save_vocabulary(directory, {_name(vocabulary): vocabulary.content()})


def _name(vocabulary: Vocabulary) -> str:
  """The name of the file in which a run keeps it."""
  if isinstance(vocabulary, Characters):
    return CHARACTERS_FILE
  if isinstance(vocabulary, Bytes):
    return BYTES_FILE
  return TOKENIZER_FILE
