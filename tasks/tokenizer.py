"""A vocabulary of subwords, in the file format of the library `tokenizers`.

`train_tokenizer` trains byte-level byte-pair encoding (Radford et al. 2019; Sennrich et
al. 2016); any other `tokenizer.json` is used unchanged.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from settings.errors import DataError
from tasks.special_tokens import OWN, PRINTABLE, SpecialTokens

_BYTES = 256
_PART = 2**20
"""Length of the blocks of a text; the library uses over 100 bytes per token."""


class Tokenizer:
  """Converts text to ids and back.

  Attributes:
    FILE: name of the file in which a run keeps the vocabulary.
    unit: plural name of the units, for messages.
    size: number of ids.
    special: ids of the special tokens.
    ordinary: ids of the other tokens, int32.
    prefix: ids that the file's template puts before a text.
    file: file of the vocabulary, for messages.
  """

  FILE = "tokenizer.json"
  unit = "tokens"

  def __init__(self, content: bytes, file: str = FILE):
    """Reads a vocabulary.

    Args:
      content: content of a `tokenizer.json`.
      file: its name, for messages.

    Raises:
      DataError: `content` is not that of a `tokenizer.json`.
    """
    self._content = content
    self.file = file
    try:
      self._library: Any = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # The library raises bare Exceptions.
      raise DataError(
        f"task.tokenizer: {file} is not a tokenizer.json: {error}"
      ) from error
    # The file may have settings of both.
    self._library.no_truncation()
    self._library.no_padding()
    ids = self._library.get_vocab(with_added_tokens=True)
    added = self._library.get_added_tokens_decoder()
    special = {i for i, token in added.items() if token.special}
    self.size = 1 + max(ids.values(), default=-1)
    self.special = SpecialTokens.find(ids)
    # The file may list EOS as an ordinary token.
    special.update(self.special.ids)
    self.ordinary = np.array(sorted({*ids.values()} - special), np.int32)
    self._special_ids = special
    self.prefix = _prefix(self._library)

  def encode_text(self, text: str) -> np.ndarray:
    """Ids of a text, int32; the names of special tokens are plain text."""
    return _concatenate(
      [np.array(x.ids, np.int32) for x in self._encodings(text)]
    )

  def align(self, text: str) -> tuple[np.ndarray, np.ndarray]:
    """`encode_text`, and the number of characters of each id.

    A character that no token covers, such as a space in WordPiece, belongs to the next
    token, or at the end of a block to the last one. So the sum is the length of the text
    before any normalizer.
    """
    ids, lengths = [], []
    for part, encoding in zip(
      parts([text]), self._encodings(text), strict=True
    ):
      ids.append(np.array(encoding.ids, np.int32))
      ends = np.array([end for _, end in encoding.offsets], np.int32)
      if len(ends):
        ends[-1] = len(part)
      # All byte tokens of a character end where the character ends.
      lengths.append(np.diff(np.maximum.accumulate(ends), prepend=0))
    return _concatenate(ids), _concatenate(lengths)

  def encode(self, line: str) -> list[int]:
    """Ids of a user's line; recognises the names of special tokens.

    Raises:
      ValueError: the line has no tokens.
    """
    ids = self._library.encode(line, add_special_tokens=False).ids
    if not ids:
      raise ValueError(f"expected text with at least one token, got {line!r}")
    return ids

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS, without padding."""
    special, ids = self.special, [int(i) for i in ids]
    if special.eos in ids:
      ids = ids[: ids.index(special.eos)]
    ids = [i for i in ids if i not in (special.pad, special.bos)]
    return self._library.decode(ids, skip_special_tokens=False)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The text of each id, with visible spaces and line ends."""
    return [self._label(int(i)) for i in ids]

  def content(self) -> bytes:
    """The content of the file, unchanged."""
    return self._content

  def _encodings(self, text: str) -> Iterator[Any]:
    """Encodings of a text in blocks, without special tokens."""
    for part in parts([text]):
      self._library.encode_special_tokens = True
      encoding = self._library.encode(part, add_special_tokens=False)
      self._library.encode_special_tokens = False
      yield encoding

  def _label(self, token_id: int) -> str:
    token = self._library.id_to_token(token_id) or f"<{token_id}>"
    if token_id in self._special_ids:
      return token
    text = self._library.decode([token_id], skip_special_tokens=False)
    # An incomplete character has no text.
    return token if not text or "\ufffd" in text else text.translate(PRINTABLE)

  @classmethod
  def read(cls, content: bytes, extra: Sequence[str], file: str) -> Self:
    """Like the constructor; ignores `extra`, because the file has special tokens."""
    del extra
    return cls(content, file)


def _prefix(library: Any) -> tuple[int, ...]:
  plain = library.encode("a", add_special_tokens=False).ids
  encoded = library.encode("a").ids
  for start in range(len(encoded) - len(plain) + 1):
    if plain and encoded[start : start + len(plain)] == plain:
      return tuple(encoded[:start])
  return ()


def train_tokenizer(
  text: str | Iterable[str], size: int, extra: Sequence[str] = ()
) -> Tokenizer:
  """Trains byte-level byte-pair encoding; equal texts give equal bytes.

  The ids are `<pad>`, `<bos>`, `<eos>`, the `extra` tokens, 256 bytes, and the merged
  pairs.

  Args:
    text: the training text, as one string or in blocks.
    size: number of ids.
    extra: names of further special tokens.

  Returns:
    A vocabulary of exactly `size` ids.

  Raises:
    DataError: `size` is less than the bytes and special tokens, or the text has too
      few pairs.

  Paper: Language models are unsupervised multitask learners (Radford et al.
  2019), section 2.2.
  """
  special = [*OWN, *extra]
  min_size = _BYTES + len(special)
  if size < min_size:
    raise DataError(
      f"task.vocab_size: expected at least {min_size} subwords, which are "
      f"{_BYTES} bytes and {len(special)} special tokens, got {size}"
    )
  library: Any = tokenizers.Tokenizer(models.BPE())
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  library.decoder = decoders.ByteLevel()
  if isinstance(text, str):
    # A text has no more pairs than bytes, and the library allocates memory for
    # `vocab_size` of them.
    max_size, text = min_size + len(text.encode()), [text]
  else:
    max_size = size
  trainer = trainers.BpeTrainer(
    vocab_size=min(size, max_size),
    special_tokens=special,
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  library.train_from_iterator(parts(text), trainer)
  if library.get_vocab_size() < size:
    raise DataError(
      f"task.vocab_size: expected at most {library.get_vocab_size()} subwords, "
      f"the number that this text supports, got {size}"
    )
  return Tokenizer(library.to_str().encode())


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
  return np.concatenate(arrays) if arrays else np.zeros(0, np.int32)


def parts(blocks: Iterable[str]) -> Iterator[str]:
  """Splits a text into blocks of about a megabyte that end at a line end.

  The result does not depend on how the input is split into blocks.
  """
  text = ""
  for block in blocks:
    text, start = text + block, 0
    while (end := text.find("\n", start + _PART)) >= 0:
      yield text[start : end + 1]
      start = end + 1
    text = text[start:]
  if text:
    yield text
