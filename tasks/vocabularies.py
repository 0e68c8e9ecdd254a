"""The vocabulary that a config asks for: made, opened or restored."""

from collections.abc import Sequence
import pathlib
from typing import Literal, Protocol

from settings.checks import check
from tasks import base
from tasks.characters import FILE as CHARACTERS_FILE
from tasks.characters import Characters
from tasks.tokenizer import FILE as TOKENIZER_FILE
from tasks.tokenizer import Tokenizer, open_tokenizer, train_tokenizer

Vocabulary = Characters | Tokenizer


class VocabularyLeaves(Protocol):
  """The leaves of a task that say which vocabulary it has."""

  @property
  def vocabulary(self) -> Literal["characters", "subwords"]:
    """'characters', or 'subwords', which are trained on the text."""
    ...

  @property
  def vocab_size(self) -> int:
    """Subwords, special tokens included."""
    ...

  @property
  def tokenizer(self) -> str:
    """A `tokenizer.json` or its folder, in place of the other two; or ''."""
    ...


def check_leaves(config: VocabularyLeaves) -> None:
  """Raises ValueError for a vocabulary that there is not."""
  check(
    config,
    "vocabulary",
    config.vocabulary in ("characters", "subwords"),
    "'characters' or 'subwords'",
  )
  check(config, "vocab_size", config.vocab_size >= 1, "at least 1 subword")


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
    vocabulary: Vocabulary = open_tokenizer(config.tokenizer)
  elif config.vocabulary == "subwords":
    vocabulary = train_tokenizer(training_text, config.vocab_size, extra)
  else:
    vocabulary = Characters(sorted(set(text)), extra)
  base.check_vocabulary(workdir, _file(config), vocabulary.content())
  return vocabulary


def restore_vocabulary(
  config: VocabularyLeaves,
  extra: Sequence[str],
  workdir: pathlib.Path | None,
) -> Vocabulary:
  """Reads the vocabulary of a run; without one, the tokenizer of the config."""
  if workdir is None and config.tokenizer:
    return open_tokenizer(config.tokenizer)
  if _file(config) == TOKENIZER_FILE:
    return Tokenizer.load(workdir)
  return Characters.load(workdir, extra)


def save_vocabulary(
  config: VocabularyLeaves, vocabulary: Vocabulary, directory: pathlib.Path
) -> None:
  """Writes what `restore_vocabulary` reads."""
  base.save_vocabulary(directory, {_file(config): vocabulary.content()})


def _file(config: VocabularyLeaves) -> str:
  is_tokenizer = config.tokenizer or config.vocabulary == "subwords"
  return TOKENIZER_FILE if is_tokenizer else CHARACTERS_FILE
