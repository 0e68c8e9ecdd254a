"""The options of the translation task, checked."""

from typing import Annotated, Literal

from annotated_types import Ge, Interval
from pydantic.dataclasses import dataclass

from settings.checks import check, check_unread
from settings.fields import STRICT, Count

AUTOMATIC_SIZES = {"numbers": 128, "files": 4000, "tfds": 8000}
"""Subwords of each source where the config leaves the number open."""

_OF_NUMBERS = ("max_number", "num_train", "num_validation")


@dataclass(frozen=True, config=STRICT)
class TranslationConfig:
  """Where sentence pairs come from, and how they are cut into batches.

  Attributes:
    source: 'numbers' needs nothing; 'files' reads the folder `path`, with
      `train.en`, `train.de` and so on, plain or .gz; 'tfds' takes `dataset`.
    path: folder of 'files'; for 'tfds', a data folder that has it prepared.
    dataset: name in the TFDS catalogue.
    source_language: file ending, TFDS feature or num2words language.
    target_language: likewise.
    vocab_size: subwords, joint; 0 takes 128 for numbers, 4,000 for files
      and 8,000 for tfds. A small text may support fewer.
    max_length: tokens of a sentence with EOS. Longer training pairs are left
      out, longer held-out sources are cut; both are counted and reported.
    num_buckets: distinct batch shapes; each costs one compilation.
    max_number: for 'numbers', the largest, up to 9,999,999.
    num_train: for 'numbers', how many are trained.
    num_validation: for 'numbers', how many are held out.
  """

  source: Literal["numbers", "files", "tfds"] = "numbers"
  path: str = ""
  dataset: str = "ted_hrlr_translate/pt_to_en"
  source_language: str = "en"
  target_language: str = "de"
  vocab_size: int = 0
  max_length: Annotated[int, Ge(2)] = 128
  num_buckets: Count = 6
  max_number: Annotated[int, Interval(ge=999, le=9_999_999)] = 999_999
  num_train: Count = 20_000
  num_validation: Count = 1_000

  def __post_init__(self):
    unread = {
      "numbers": ("path", "dataset"),
      "files": ("dataset", *_OF_NUMBERS),
      "tfds": _OF_NUMBERS,
    }
    check_unread(self, unread[self.source], f"source={self.source!r}")
    needs_path = self.source == "files"
    check(
      self,
      "path",
      bool(self.path) or not needs_path,
      f"a folder with train.{self.source_language} and "
      f"train.{self.target_language}",
    )
    check(
      self,
      "dataset",
      bool(self.dataset) or self.source != "tfds",
      "a name of the TFDS catalogue",
    )
    check(self, "source_language", bool(self.source_language), "a name")
    check(
      self,
      "target_language",
      self.target_language not in ("", self.source_language),
      f"a language other than {self.source_language!r}",
    )
    check(
      self,
      "vocab_size",
      # SentencePiece counts in 32 bits.
      self.vocab_size == 0 or 5 <= self.vocab_size < 2**31,
      "5 to 2**31 - 1 subwords, or 0 for a size that suits the source",
    )
