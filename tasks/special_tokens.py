"""The special tokens of a vocabulary, found by their names."""

from collections.abc import Mapping
from typing import NamedTuple

from settings.errors import DataError

OWN = ("<pad>", "<bos>", "<eos>")
"""What every vocabulary made here begins with: ids 0, 1 and 2."""

OWN_ENCODER = ("<cls>", "<sep>", "<mask>")
"""What follows where an encoder reads the text."""

PRINTABLE = str.maketrans({"\n": "⏎", " ": "␣", "\t": "⇥"})
"""How the axes of a picture show spaces and line ends."""

NAMES: Mapping[str, tuple[str, ...]] = {
  "pad": ("<pad>", "[PAD]", "<|endoftext|>", "</s>"),
  "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>", "[CLS]"),
  "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
  "cls": ("<cls>", "[CLS]", "<s>"),
  "sep": ("<sep>", "[SEP]", "</s>"),
  "mask": ("<mask>", "[MASK]"),
}
"""Role -> how it is called, in the order in which the names are tried."""


class SpecialTokens(NamedTuple):
  """Ids of the special tokens of a vocabulary; None if it lacks a token.

  Attributes:
    pad: fills rows up to a common length.
    bos: what a decoder reads first.
    eos: ends a sequence.
    cls: comes before a text that an encoder reads.
    sep: comes after it.
    mask: stands for a token that is to be predicted.
    sentinels: `<extra_id_0>`, `<extra_id_1>`, …: each stands for a span.
  """

  pad: int | None
  bos: int | None
  eos: int | None
  cls: int | None
  sep: int | None
  mask: int | None
  sentinels: tuple[int, ...]

  @classmethod
  def find(cls, ids: Mapping[str, int]) -> "SpecialTokens":
    """Finds the special tokens among all tokens.

    A decoder reads padding first where there is no beginning (T5), and the end
    pads where there is no padding (GPT-2).

    Args:
      ids: token -> id.
    """
    tokens: dict[str, int | None] = {
      role: next((ids[name] for name in names if name in ids), None)
      for role, names in NAMES.items()
    }
    if tokens["pad"] is None:
      tokens["pad"] = tokens["eos"]
    if tokens["bos"] is None:
      tokens["bos"] = tokens["pad"]
    sentinels = []
    while (name := sentinel(len(sentinels))) in ids:
      sentinels.append(ids[name])
    return cls(**tokens, sentinels=tuple(sentinels))

  @property
  def ids(self) -> set[int]:
    """The ids of all special tokens."""
    roles = {getattr(self, role) for role in NAMES} - {None}
    return roles | {*self.sentinels}

  def need(self, role: str, file: str, objective: str) -> int:
    """The id of a token; DataError if the vocabulary lacks it.

    Args:
      role: a key of `NAMES`.
      file: which has the vocabulary, for the message.
      objective: what needs the token, for the message.
    """
    token_id = getattr(self, role)
    if token_id is None:
      raise DataError(
        f"task.tokenizer: {file} has no token {' or '.join(NAMES[role])}, which "
        f"{objective} needs"
      )
    return token_id

  def need_sentinels(
    self, count: int, file: str, objective: str
  ) -> tuple[int, ...]:
    """The first sentinels; DataError if there are fewer."""
    if len(self.sentinels) < count:
      raise DataError(
        f"task.tokenizer: {file} has {len(self.sentinels)} of the tokens "
        f"{sentinel(0)} to {sentinel(count - 1)}, which {objective} needs"
      )
    return self.sentinels[:count]

  @property
  def around(self) -> tuple[list[int], list[int]]:
    """The tokens that an encoder reads before and after a text: `[CLS] … [SEP]`.

    Nothing where the vocabulary does not have both.
    """
    if self.cls is None or self.sep is None:
      return [], []
    return [self.cls], [self.sep]


def sentinel(number: int) -> str:
  """The name of a sentinel in T5's notation."""
  return f"<extra_id_{number}>"
