"""A vocabulary of the characters of a text."""

from collections.abc import Sequence
import json
import pathlib
import re

import numpy as np

from tasks import base
from tasks.base import DataError
from tasks.files import read_bytes
from tasks.special_tokens import OWN, SpecialTokens

FILE = "characters.json"
_PRINTABLE = {"\n": "⏎", " ": "␣", "\t": "⇥"}


class Characters:
  """Text to ids and back, a character an id; special tokens come first.

  Attributes:
    unit: what an id is, in a message.
    size: number of ids.
    special: ids of the special tokens.
    ordinary: ids of characters, int32.
    file: where the vocabulary is kept, for a message.
  """

  unit = "characters"
  file = FILE

  def __init__(self, characters: Sequence[str], extra: Sequence[str] = ()):
    """Takes the characters.

    Args:
      characters: sorted by code point.
      extra: names of special tokens in addition to `<pad>`, `<bos>`, `<eos>`.
    """
    special = [*OWN, *extra]
    self._first = len(special)
    self._symbols = [*special, *characters]
    self._ids = {symbol: i for i, symbol in enumerate(self._symbols)}
    # As a user types them: those that a model reads.
    self._typed = "|".join(map(re.escape, extra))
    self.size = len(self._symbols)
    self.special = SpecialTokens.find({s: i for i, s in enumerate(special)})
    self.ordinary = np.arange(self._first, self.size, dtype=np.int32)

  def check_knows(self, text: str) -> None:
    """Raises DataError where a text has a character that is not here."""
    for character in sorted({*text} - self._ids.keys()):
      raise DataError(
        f"task.tokenizer: the text has the character {character!r}, which is "
        f"not among the {self.size - self._first} that the vocabulary knows"
      )

  def encode_text(self, text: str) -> np.ndarray:
    """Ids of a text of known characters alone, int32."""
    # Sorted by code point, so this is `self._ids`, at once.
    known = [ord(character) for character in self._symbols[self._first :]]
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return (np.searchsorted(known, codes) + self._first).astype(np.int32)

  def encode(self, line: str) -> list[int]:
    """Ids of a line that a user typed; special tokens by their names.

    Raises:
      ValueError: a character that does not occur in the text.
    """
    parts = re.split(f"({self._typed})", line) if self._typed else [line]
    symbols: list[str] = []
    for number, part in enumerate(parts):
      symbols += [part] if number % 2 else part
    for symbol in symbols:
      if symbol not in self._ids:
        raise ValueError(f"{symbol!r} does not occur in the training text")
    return [self._ids[symbol] for symbol in symbols]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Characters of ids, up to EOS."""
    return "".join(self._symbols[i] for i in base.until_eos(ids))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The character of each id, spaces and line ends made visible."""
    symbols = [self._symbols[int(i)] for i in ids]
    return [_PRINTABLE.get(symbol, symbol) for symbol in symbols]

  def content(self) -> bytes:
    """The characters in the order of their ids, as the file has them."""
    characters = self._symbols[self._first :]
    return json.dumps(characters, ensure_ascii=False, indent=0).encode()

  @classmethod
  def load(
    cls, workdir: pathlib.Path | None, extra: Sequence[str] = ()
  ) -> "Characters":
    """Reads the characters of a run."""
    return cls(json.loads(base.load_vocabulary(workdir, FILE)), extra)


def open_characters(
  file: pathlib.Path, extra: Sequence[str] = ()
) -> Characters:
  """Reads the `characters.json` that another run wrote.

  Raises:
    DataError: it cannot be read, or is something else.
  """
  try:
    found = json.loads(read_bytes(file))
  except ValueError as error:
    raise DataError(f"task.tokenizer: {file} is not JSON: {error}") from error
  if not isinstance(found, list) or not all(
    isinstance(one, str) and len(one) == 1 for one in found
  ):
    raise DataError(f"task.tokenizer: {file} is not a list of characters")
  return Characters(found, extra)
