"""Vocabularies that need no training: characters, UTF-8 bytes and ids."""

import abc
from collections.abc import Mapping, Sequence
import json
import re
from typing import Self

import numpy as np

from settings.errors import DataError
from tasks import base
from tasks.special_tokens import OWN, PRINTABLE, SpecialTokens


class Units(abc.ABC):
  """Converts text to ids and back, with one id per unit of text.

  Attributes:
    FILE: name of the file in which a run keeps the vocabulary.
    unit: plural name of the units, for messages.
    size: number of ids.
    special: ids of the special tokens.
    ordinary: ids of units of text, int32.
    file: file of the vocabulary, for messages.
  """

  FILE: str
  unit: str

  def __init__(
    self, names: Mapping[int, str], count: int, extra: Sequence[str]
  ):
    """Creates a vocabulary.

    Args:
      names: maps ids to special tokens.
      count: number of units of text.
      extra: special tokens that `encode` recognises in a user's line.
    """
    self._names = names
    self._ids = {name: i for i, name in names.items()}
    self._name_pattern = "|".join(map(re.escape, extra))
    self._first = next(i for i in range(len(names) + 1) if i not in names)
    self.file = self.FILE
    self.size = len(names) + count
    self.special = SpecialTokens.find(self._ids)
    self.ordinary = np.arange(self._first, self._first + count, dtype=np.int32)

  @abc.abstractmethod
  def encode_text(self, text: str) -> np.ndarray:
    """Ids of a text, int32; the names of special tokens are plain text."""

  def align(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """`encode_text`, and the number of characters of each id."""
    ids = self.encode_text(text)
    return ids, np.ones_like(ids)

  @abc.abstractmethod
  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS."""

  @abc.abstractmethod
  def content(self) -> bytes:
    """The content of the vocabulary file."""

  def encode(self, line: str) -> list[int]:
    """Ids of a user's line; recognises the names of special tokens.

    Raises:
      ValueError: the vocabulary does not have a character.
    """
    pattern = self._name_pattern
    parts = re.split(f"({pattern})", line) if pattern else [line]
    ids: list[int] = []
    for number, part in enumerate(parts):
      is_name = number % 2
      ids += [self._ids[part]] if is_name else self._encode_plain(part)
    return ids

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id, with visible spaces and line ends."""
    return [self._names.get(int(i)) or self._label(int(i)) for i in ids]

  @abc.abstractmethod
  def _encode_plain(self, text: str) -> list[int]:
    """Ids of a user's text, without special tokens."""

  @abc.abstractmethod
  def _label(self, token_id: int) -> str:
    """The text of a unit."""


class Characters(Units):
  """One id per character, after the special tokens.

  A new vocabulary is sorted by code point; a file may have any order.
  """

  FILE = "characters.json"
  unit = "characters"

  def __init__(self, characters: Sequence[str], extra: Sequence[str] = ()):
    """Creates a vocabulary of distinct characters and `extra` special tokens."""
    super().__init__(dict(enumerate([*OWN, *extra])), len(characters), extra)
    self._characters = list(characters)
    self._character_ids = {c: self._first + i for i, c in enumerate(characters)}

  def check_knows(self, text: str) -> None:
    """Raises DataError if a text has an unknown character."""
    for character in sorted({*text} - self._character_ids.keys()):
      raise DataError(
        f"task.tokenizer: the text has the character {character!r}, which is not "
        f"one of the {len(self._characters)} characters of the vocabulary"
      )

  def encode_text(self, text: str) -> np.ndarray:
    """Ids of a text that has only known characters, int32."""
    # A vectorised lookup in `self._character_ids`.
    vocabulary = np.array([ord(c) for c in self._characters], np.uint32)
    order = np.argsort(vocabulary)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    indices = order[np.searchsorted(vocabulary, codes, sorter=order)]
    return (indices + self._first).astype(np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Characters of ids, up to EOS."""
    return "".join(
      self._names.get(i) or self._characters[i - self._first]
      for i in base.until_eos(ids)
    )

  def content(self) -> bytes:
    """The characters in the order of their ids."""
    return json.dumps(self._characters, ensure_ascii=False, indent=0).encode()

  @classmethod
  def read(cls, content: bytes, extra: Sequence[str], file: str) -> Self:
    """Reads the `characters.json` that a run wrote, or raises DataError."""
    try:
      characters = json.loads(content)
    except (ValueError, RecursionError) as error:
      raise DataError(f"task.tokenizer: {file} is not JSON: {error}") from error
    if not isinstance(characters, list) or not all(
      isinstance(x, str) and len(x) == 1 for x in characters
    ):
      raise DataError(f"task.tokenizer: {file} is not a list of characters")
    if len({*characters}) < len(characters):
      raise DataError(f"task.tokenizer: {file} has a character twice")
    return cls(characters, extra)

  def _encode_plain(self, text: str) -> list[int]:
    for character in text:
      if character not in self._character_ids:
        raise ValueError(f"{character!r} does not occur in the training text")
    return [self._character_ids[character] for character in text]

  def _label(self, token_id: int) -> str:
    return self._characters[token_id - self._first].translate(PRINTABLE)


class Bytes(Units):
  """One id per byte, equal to its value + 6; encodes any text without training.

  Special tokens other than `SPECIAL` follow the bytes.
  """

  FILE = "bytes.json"
  unit = "bytes"
  SPECIAL = (*OWN, "<mask>", "<cls>", "<sep>")
  """The special tokens before the bytes, as in the published Perceiver IO."""

  def __init__(self, extra: Sequence[str] = ()):
    """Creates a vocabulary with `extra` special tokens after the bytes."""
    others = [name for name in extra if name not in self.SPECIAL]
    names = dict(enumerate(self.SPECIAL))
    names |= dict(enumerate(others, len(names) + 256))
    super().__init__(names, 256, extra)

  def encode_text(self, text: str) -> np.ndarray:
    """Ids of a text, int32; the names of special tokens are plain text."""
    values = np.frombuffer(text.encode("utf-8"), np.uint8)
    return values.astype(np.int32) + self._first

  def align(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Like `Units.align`; only the first byte of a character has length 1."""
    ids = self.encode_text(text)
    is_first = (ids - self._first) & 0b1100_0000 != 0b1000_0000
    return ids, is_first.astype(np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS; an incomplete character becomes '�'."""
    values = (
      self._names[i].encode() if i in self._names else self._byte(i)
      for i in base.until_eos(ids)
    )
    return b"".join(values).decode("utf-8", errors="replace")

  def content(self) -> bytes:
    """The special tokens before the bytes."""
    return json.dumps(self.SPECIAL, indent=0).encode()

  @classmethod
  def read(cls, content: bytes, extra: Sequence[str], file: str) -> Self:
    """Reads the `bytes.json` that a run wrote, or raises DataError."""
    vocabulary = cls(extra)
    if content != vocabulary.content():
      raise DataError(
        f"task.tokenizer: {file} is not the special tokens "
        f"{' '.join(cls.SPECIAL)}"
      )
    return vocabulary

  def _encode_plain(self, text: str) -> list[int]:
    return self.encode_text(text).tolist()

  def _byte(self, token_id: int) -> bytes:
    return bytes([token_id - self._first])

  def _label(self, token_id: int) -> str:
    value = self._byte(token_id)
    text = value.decode("ascii", errors="backslashreplace").translate(PRINTABLE)
    return text if text.isprintable() else f"\\x{value[0]:02x}"


class Ids(Units):
  """Ids without text, which are written as numbers.

  Special tokens follow them.
  """

  FILE = "ids.json"
  unit = "ids"

  def __init__(self, count: int, extra: Sequence[str] = ()):
    """Creates a vocabulary of the ids 0 to `count` − 1 and `extra` special tokens."""
    names = dict(enumerate([*OWN, *extra], count))
    super().__init__(names, count, extra)
    self._count = count

  def encode_text(self, text: str) -> np.ndarray:
    """Ids of numbers that are separated by spaces, int32."""
    return np.array(self._encode_plain(text), np.int32)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Ids separated by spaces, up to EOS."""
    special, ids = self.special, [int(i) for i in ids]
    if special.eos in ids:
      ids = ids[: ids.index(special.eos)]
    skipped = special.pad, special.bos
    return " ".join(self.labels([i for i in ids if i not in skipped]))

  def content(self) -> bytes:
    """The number of ids."""
    return json.dumps(self._count).encode()

  @classmethod
  def read(cls, content: bytes, extra: Sequence[str], file: str) -> Self:
    """Reads the `ids.json` that a run wrote, or raises DataError."""
    try:
      return cls(int(json.loads(content)), extra)
    except (TypeError, ValueError, RecursionError) as error:
      raise DataError(
        f"task.tokenizer: {file} is not a number of ids"
      ) from error

  def _encode_plain(self, text: str) -> list[int]:
    for word in text.split():
      if not word.isdecimal() or int(word) >= self._count:
        raise ValueError(
          f"expected ids from 0 to {self._count - 1}, separated by spaces, got "
          f"{word!r}"
        )
    return [*map(int, text.split())]

  def _label(self, token_id: int) -> str:
    return str(token_id)
