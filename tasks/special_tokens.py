"""The special tokens of a vocabulary, which are identified by their names."""

from collections.abc import Mapping
from typing import NamedTuple

from settings.errors import DataError

OWN = ("<pad>", "<bos>", "<eos>")
"""The tokens with ids 0, 1 and 2 in every vocabulary that this package creates."""

OWN_ENCODER = ("<cls>", "<sep>", "<mask>")
"""Additional special tokens of a vocabulary for an encoder."""

PRINTABLE = str.maketrans({"\n": "⏎", " ": "␣", "\t": "⇥"})
"""Visible characters for spaces and line ends on the axes of pictures."""

NAMES: Mapping[str, tuple[str, ...]] = {
  "pad": ("<pad>", "[PAD]", "<|endoftext|>", "</s>"),
  "bos": ("<bos>", "<s>", "<|begin_of_text|>", "<|endoftext|>", "[CLS]"),
  "eos": ("<eos>", "</s>", "<|end_of_text|>", "<|endoftext|>", "[SEP]"),
  "cls": ("<cls>", "[CLS]", "<s>"),
  "sep": ("<sep>", "[SEP]", "</s>"),
  "mask": ("<mask>", "[MASK]"),
}
"""Maps each role to its possible names, in order of preference."""


class SpecialTokens(NamedTuple):
  """Ids of the special tokens of a vocabulary; None for a token that it does not have.

  Attributes:
    pad: fills rows up to a common length.
    bos: the first input of a decoder.
    eos: ends a sequence.
    cls: precedes a text that an encoder reads.
    sep: follows a text that an encoder reads.
    mask: replaces a token that is predicted.
    sentinels: `<extra_id_0>`, `<extra_id_1>`, …; each replaces a span.
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

    If there is no BOS, padding is used (T5); if there is no padding, EOS is (GPT-2).

    Args:
      ids: maps tokens to ids.
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
    """The id of a token; DataError if the vocabulary does not have it.

    Args:
      role: a key of `NAMES`.
      file: file of the vocabulary, for the message.
      objective: objective that needs the token, for the message.
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
  def encoder_tokens(self) -> tuple[list[int], list[int]]:
    """The tokens that an encoder reads before and after a text: `[CLS] … [SEP]`.

    Both lists are empty unless the vocabulary has both tokens.
    """
    if self.cls is None or self.sep is None:
      return [], []
    return [self.cls], [self.sep]


def sentinel(number: int) -> str:
  """The name of a sentinel in T5's notation."""
  return f"<extra_id_{number}>"
