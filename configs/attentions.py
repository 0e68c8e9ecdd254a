"""The three attention choices of a model, from the name of one mechanism."""

from collections.abc import Iterable
from typing import Any

from attention import ATTENTIONS, Attention, registry
from attention.suggest import one_of
from models.attention_config import NEEDS, obstacle


def one(
  name: str, *, long: bool = False, also: Iterable[str] = ()
) -> dict[str, Any]:
  """A mechanism with hyperparameters from its record, for a model with one slot.

  Args:
    name: key of `attention.ATTENTIONS`, or 'package.module:factory'.
    long: for the hundreds or thousands of tokens of configs/paper/, and not for
      the short sequences of the other configs.
    also: other names that the config knows.

  Returns:
    A dictionary of the name and the hyperparameters.

  Raises:
    ValueError: there is no such mechanism.
  """
  sizes = _record(name, also).sizes
  return {"name": name, **(sizes.long if long else sizes.short)}


def choose(name: str, *, also: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
  """Uses a mechanism wherever it can work, and dense where it cannot.

  Args:
    name: key of `attention.ATTENTIONS`, or 'package.module:factory'.
    also: other names that the config knows.

  Returns:
    'encoder_attention', 'decoder_attention' and 'cross_attention', each a
    dictionary of the name and its hyperparameters.

  Raises:
    ValueError: there is no such mechanism.
  """
  record = _record(name, also)
  chosen = {"name": name, **record.sizes.short}
  return {
    slot: {"name": "dense"} if obstacle(record, slot) else dict(chosen)
    for slot in NEEDS
  }


def _record(name: str, also: Iterable[str]) -> Attention:
  if name not in ATTENTIONS and ":" not in name:
    known = [*ATTENTIONS, *also, "package.module:factory"]
    raise ValueError(f"attention: {one_of(name, known)}")
  try:
    return registry.example(name)
  except ValueError as error:
    reason = str(error).removeprefix("name: ")
    raise ValueError(f"attention: {reason}") from None
