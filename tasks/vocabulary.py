"""Subword vocabulary: byte-pair encoding, shared by source and target.

Sennrich et al. 2016, as implemented in SentencePiece (Kudo and Richardson 2018).
"""

from collections.abc import Iterable, Sequence
import hashlib
import io
import pathlib
import re

import numpy as np
import sentencepiece

from settings import cache
from tasks import base
from tasks.base import BOS, EOS, PAD, DataError

MODEL_FILE = "subwords.model"
LIST_FILE = "subwords.txt"

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_MARK = "\r"
"""Ends the names of special tokens in the model, so that no text equals them."""

_RESERVED = "\0\r▁▅"
"""Characters that SentencePiece drops or treats as spaces."""

_PRIVATE = "\U000f0000\U000f0001\U000f0002\U000f0003"
"""Private-use characters that are swapped with the reserved ones in the model."""

_SWAPS = str.maketrans(_RESERVED + _PRIVATE, _PRIVATE + _RESERVED)


class Subwords:
  """Converts text to ids and back: a SentencePiece model with the ids of `tasks.base`.

  `decode(encode(text))` equals the text if its characters are in the vocabulary:
  nothing is normalised, and names of special tokens in a text are plain text.

  Attributes:
    model: the serialised model.
    size: number of ids.
  """

  def __init__(self, model: bytes):
    self.model = model
    self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    self.size: int = self._processor.get_piece_size()

  def encode(self, lines: Sequence[str]) -> list[list[int]]:
    """Ids of each line, without BOS and EOS; 10 µs per line."""
    return self._processor.encode([line.translate(_SWAPS) for line in lines])

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS."""
    text = self._processor.decode(base.until_eos(ids))
    return text.translate(_SWAPS)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The piece of each id; '▁' stands for the space before a word."""
    return [
      _SPECIAL[i] if i < len(_SPECIAL) else self._processor.id_to_piece(i)
      for i in map(int, ids)
    ]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the model, and a readable list of its pieces."""
    base.save_vocabulary(
      directory, {MODEL_FILE: self.model, LIST_FILE: self.content()}
    )

  def content(self) -> bytes:
    """The piece of each id, one per line; the list determines the ids of any text."""
    pieces = self.labels(range(self.size))
    lines = (f"{i}\t{piece}\n" for i, piece in enumerate(pieces))
    return "".join(lines).encode()

  @classmethod
  def load(cls, workdir: pathlib.Path | None) -> "Subwords":
    """Reads the vocabulary of a run."""
    return cls(base.load_vocabulary(workdir, MODEL_FILE))


def train_subwords(lines: Iterable[str], size: int) -> bytes:
  """Trains a model on lines of text; equal lines give equal bytes.

  If a text is too small for `size` pieces, the model has as many as it supports.
  Characters are not normalised, because references are not normalised either.

  Raises:
    DataError: `size` is less than the number of distinct characters.
  """
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=(line.translate(_SWAPS) for line in lines),
      model_writer=model,
      model_type="bpe",
      vocab_size=size,
      hard_vocab_limit=False,
      character_coverage=1.0,
      normalization_rule_name="identity",
      remove_extra_whitespaces=False,
      # SentencePiece skips longer lines, even their characters.
      max_sentence_length=2**30,
      pad_id=PAD,
      bos_id=BOS,
      eos_id=EOS,
      unk_id=3,
      pad_piece=f"<pad>{_MARK}",
      bos_piece=f"<bos>{_MARK}",
      eos_piece=f"<eos>{_MARK}",
      unk_piece=f"<unk>{_MARK}",
      num_threads=1,
      minloglevel=2,
    )
  except RuntimeError as error:
    match = re.search(r"required_chars\. \d+ vs (\d+)", str(error))
    if match:
      raise DataError(
        f"task.vocab_size: {size} pieces are too few for this text, whose "
        f"characters need {match[1]}"
      ) from None
    first_line = str(error).splitlines()[0]
    raise DataError(f"cannot train a vocabulary: {first_line}") from error
  return model.getvalue()


def cached_subwords(lines: Iterable[str], size: int, digest: str) -> Subwords:
  """Trains once for each (text, size) and stores the model in the cache.

  Args:
    lines: the training text; read only if the cache has no model.
    size: requested number of pieces.
    digest: hash of the text.
  """
  # Increment the number if the same text gives another model.
  key = f"2 {digest} {size} {sentencepiece.__version__}"
  name = hashlib.sha256(key.encode()).hexdigest()[:16] + ".model"

  def write(scratch: pathlib.Path) -> pathlib.Path:
    path = scratch / name
    path.write_bytes(train_subwords(lines, size))
    return path

  path = cache.prepare(cache.folder("vocabularies") / name, write)
  return Subwords(path.read_bytes())
