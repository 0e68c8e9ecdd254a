"""A vocabulary of the 256 bytes of UTF-8: any text, without training."""

from collections.abc import Sequence
import json
import pathlib
import re

import numpy as np

from tasks import base
from tasks.base import DataError
from tasks.files import read_bytes
from tasks.special_tokens import SpecialTokens

FILE = "bytes.json"
SPECIAL = ("<pad>", "<bos>", "<eos>", "<mask>", "<cls>", "<sep>")
"""What comes before the bytes, as in the published Perceiver IO."""

_PRINTABLE = {"\n": "⏎", " ": "␣", "\t": "⇥"}


class Bytes:
  """Text to ids and back: a byte's id is its value + 6.

  Special tokens that are not among `SPECIAL` come after the bytes.

  Attributes:
    unit: what an id is, in a message.
    size: number of ids.
    special: ids of the special tokens.
    ordinary: ids of bytes, int32.
    file: where the vocabulary is kept, for a message.
  """

  unit = "bytes"
  file = FILE

  def __init__(self, extra: Sequence[str] = ()):
    """Takes the names of special tokens that an objective needs."""
    first = len(SPECIAL)
    after = [name for name in extra if name not in SPECIAL]
    self._names = dict(enumerate(SPECIAL))
    self._names |= dict(enumerate(after, first + 256))
    self._ids = {name: i for i, name in self._names.items()}
    # As a user types them: those that a model reads.
    self._typed = "|".join(map(re.escape, extra))
    self.size = first + 256 + len(after)
    self.special = SpecialTokens.find(self._ids)
    self.ordinary = np.arange(first, first + 256, dtype=np.int32)

  def encode_text(self, text: str) -> np.ndarray:
    """Ids of a text, int32; what reads like a special token is text."""
    values = np.frombuffer(text.encode("utf-8"), np.uint8)
    return values.astype(np.int32) + len(SPECIAL)

  def encode(self, line: str) -> list[int]:
    """Ids of a line that a user typed; special tokens by their names."""
    parts = re.split(f"({self._typed})", line) if self._typed else [line]
    ids: list[int] = []
    for number, part in enumerate(parts):
      is_name = number % 2
      ids += [self._ids[part]] if is_name else self.encode_text(part).tolist()
    return ids

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS; a part of a character becomes '\ufffd'."""
    values = (
      self._names[i].encode() if i in self._names else self._byte(i)
      for i in base.until_eos(ids)
    )
    return b"".join(values).decode("utf-8", errors="replace")

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The character of each id, or its value where it is a part of one."""
    return [self._names.get(int(i)) or self._label(int(i)) for i in ids]

  def content(self) -> bytes:
    """The special tokens in the order of their ids, as the file has them."""
    return json.dumps(SPECIAL, indent=0).encode()

  def _byte(self, token_id: int) -> bytes:
    return bytes([token_id - len(SPECIAL)])

  def _label(self, token_id: int) -> str:
    value = self._byte(token_id)
    text = value.decode("ascii", errors="backslashreplace")
    text = _PRINTABLE.get(text, text)
    return text if text.isprintable() else f"\\x{value[0]:02x}"


def open_bytes(file: pathlib.Path, extra: Sequence[str] = ()) -> Bytes:
  """Reads the `bytes.json` that a run wrote.

  Raises:
    DataError: it cannot be read, or is something else.
  """
  vocabulary = Bytes(extra)
  if read_bytes(file) != vocabulary.content():
    raise DataError(
      f"task.tokenizer: {file} is not the special tokens {' '.join(SPECIAL)}"
    )
  return vocabulary
