"""The three attention choices of a model, from the name of one mechanism."""

from collections.abc import Iterable
from typing import Any

from attention import ATTENTIONS, registry
from attention.suggest import one_of
from models.attention_config import GENERATING, NEEDS, missing


def options(name: str, *, long: bool = False) -> dict[str, Any]:
  """Hyperparameters of a mechanism for a config, from its record.

  Args:
    name: key of `attention.ATTENTIONS`, or 'package.module:factory'.
    long: for the hundreds or thousands of tokens of configs/paper/, and not for
      the short sequences of the other configs.

  Raises:
    ValueError: there is no such mechanism.
  """
  sizes = registry.example(name).sizes
  return dict(sizes.long if long else sizes.short)


def one(
  name: str, *, long: bool = False, also: Iterable[str] = ()
) -> dict[str, Any]:
  """A mechanism with its options, for a model with a single choice.

  Args:
    name: key of `attention.ATTENTIONS`, or 'package.module:factory'.
    long: as in `options`.
    also: other names that the config knows.

  Returns:
    A dictionary of the name and the options.

  Raises:
    ValueError: there is no such mechanism.
  """
  if name not in ATTENTIONS and ":" not in name:
    known = [*ATTENTIONS, *also, "package.module:factory"]
    raise ValueError(f"attention: {one_of(name, known)}")
  try:
    return {"name": name, **options(name, long=long)}
  except ValueError as error:
    reason = str(error).removeprefix("name: ")
    raise ValueError(f"attention: {reason}") from None


def choose(name: str, *, also: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
  """Uses a mechanism wherever it can work, and dense where it cannot.

  Args:
    name: key of `attention.ATTENTIONS`, or 'package.module:factory'.
    also: other names that the config knows.

  Returns:
    'encoder_attention', 'decoder_attention' and 'cross_attention', each a
    dictionary of the name and its options.

  Raises:
    ValueError: there is no such mechanism.
  """
  chosen = one(name, also=also)
  return {
    slot: {"name": "dense"} if _obstacle(name, slot) else dict(chosen)
    for slot in NEEDS
  }


def dense_because(config_file: str, model: Any) -> list[str]:
  """Why dense fills a slot in place of the mechanism that was asked for.

  Args:
    config_file: as it was typed, `FILE.py:MECHANISM`.
    model: the config that the file made of it.

  Returns:
    A line for each slot; none where nothing or no mechanism was asked for.
  """
  name = config_file.partition(":")[2]
  try:
    registry.find(name)
  except ValueError:  # A file may have names of its own.
    return []
  lines = []
  for slot, chosen in model.attentions.items():
    obstacle = _obstacle(name, slot)
    if obstacle and [config.name for config in chosen] == ["dense"]:
      place = slot.removesuffix("_attention")
      lines.append(f"{place}: dense, because {name} cannot {obstacle}")
  return lines


def _obstacle(name: str, slot: str) -> str:
  """What a slot asks of a mechanism in vain; empty where it can serve."""
  # A config evaluates by generating, so its decoder decodes as well.
  needs = NEEDS[slot] | GENERATING.get(slot, {})
  for capability in missing(registry.example(name), needs):
    return needs[capability]
  return ""
