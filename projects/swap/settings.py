"""The options of `swap.py`, which are checked before data is read."""

from collections.abc import Sequence
import dataclasses
import re
from typing import Annotated, Any, NamedTuple

from annotated_types import Ge, Interval
from pydantic.dataclasses import dataclass

from attention import ATTENTIONS
from configs import attentions
from models.attention_config import AttentionConfig
from settings.fields import STRICT, Count32, Whole, Whole32, check
from settings.typed import mechanism, split

_LONG = 256
"""Smallest context with which mechanisms have their sizes for long sequences."""

_Rate = Annotated[float, Interval(gt=0, le=1)]


class Choice(NamedTuple):
  """A mechanism to substitute in the model.

  Attributes:
    label: the text of the option, such as `performer:num_features=128`.
    config: the name and options of the mechanism.
  """

  label: str
  config: AttentionConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Settings:
  """All options except the folder of the results.

  Attributes:
    weights: folder of published weights, or workdir of a run.
    text: a UTF-8 file; its first 90 % are for training, and the rest is held out.
    attention: mechanisms, separated by commas, each a name or
      `name:option=value:option=value`; 'all' means all mechanisms of the project.
    tokenizer: vocabulary of the text; '' means that of `weights`.
    context: number of tokens of a window; None means the model's context, but at most
      256.
    length: another sequence length for which time and memory are measured.
    batch_size: number of windows of a batch.
    batches: number of held-out batches for a loss; 0 means all.
    keep: numbers k of layers that keep their own mechanism: the k layers whose swap
      alone increases the loss most.
    transfer_steps: number of updates that fit each layer's mechanism to the attention
      that it replaces.
    transfer_rate: learning rate of these updates.
    finetune_steps: number of updates of the whole model afterwards.
    finetune_rate: peak learning rate of these updates.
    seed: seed of the mechanisms' parameters and of the training windows.
  """

  weights: str
  text: str
  attention: str = "all"
  tokenizer: str = ""
  context: Annotated[Whole32, Ge(2)] | None = None
  length: Annotated[Whole32, Ge(2)] | None = None
  batch_size: Count32 = 8
  batches: Whole32 = 20
  keep: tuple[Whole, ...] = (0,)
  transfer_steps: Whole32 = 0
  transfer_rate: _Rate = 1e-2
  finetune_steps: Whole32 = 0
  finetune_rate: _Rate = 1e-4
  seed: Whole32 = 0

  def __post_init__(self):
    check(self, "weights", bool(self.weights), "a folder of weights, or a run")
    check(self, "text", bool(self.text), "a text file")
    is_unique = len(set(self.keep)) == len(self.keep)
    check(
      self,
      "keep",
      bool(self.keep) and is_unique,
      "numbers of layers, without repetition",
    )
    # Labels become file names.
    labels = self._labels()
    names = list(map(file_name, labels))
    for label, name in zip(labels, names, strict=True):
      try:
        mechanism(label)
      except ValueError as error:
        raise ValueError(f"attention: {error}") from None
      if names.count(name) > 1:
        raise ValueError(f"attention: {label} appears twice; expected once")

  def choices(self, context: int) -> list[Choice]:
    """Returns the mechanisms; those without options have the sizes for this context.

    Raises:
      ValueError: a mechanism or option is unknown, or a value is invalid.
    """
    long = context >= _LONG
    choices = []
    for label in self._labels():
      options = attentions.one(label, long=long)
      try:
        config = AttentionConfig(options.pop("name"), options)
      except ValueError as error:
        raise ValueError(f"attention: {label}: {error}") from None
      choices.append(Choice(label, config))
    return choices

  def shared(self) -> dict[str, Any]:
    """Returns the options that all rows of a folder share; mechanisms may be added."""
    mapping = dataclasses.asdict(self) | {"keep": list(self.keep)}
    del mapping["attention"]
    return mapping

  def _labels(self) -> list[str]:
    """Returns the labels of all mechanisms."""
    typed = split(self.attention)
    if not typed:
      raise ValueError("attention: expected mechanisms, or 'all', got nothing")
    return list(ATTENTIONS) if typed == ["all"] else typed


def file_name(label: str) -> str:
  """Returns the name of a mechanism's record, 'lsh-chunk_size=8' of 'lsh:chunk_size=8'.

  Other spellings of the same options, such as `[4,2]` and `(4, 2)`, have the same name.
  """
  return re.sub(r"[^\w.=-]+", "-", label).strip("-")


def numbers(typed: Sequence[str]) -> tuple[int, ...]:
  """Parses whole numbers.

  Raises:
    ValueError: a text is not a whole number.
  """
  for text in typed:
    if not text.strip().isdecimal():
      raise ValueError(f"keep: expected numbers of layers, got {text!r}")
  return tuple(map(int, typed))
