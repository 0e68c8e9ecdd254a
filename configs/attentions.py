"""The three attention choices of a model, from the name of one mechanism."""

from collections.abc import Iterable, Mapping
from typing import Any

from attention import ATTENTIONS, plug
from models.config import NEEDS
from settings.suggest import one_of

_SIZES = {name: plug.example(make).sizes for name, make in ATTENTIONS.items()}

OPTIONS = {name: dict(sizes.short) for name, sizes in _SIZES.items()}
"""Options for the short sequences of these configs, from the records."""

LONG = {name: dict(sizes.long) for name, sizes in _SIZES.items()}
"""Options for the hundreds or thousands of tokens of configs/paper/."""


def one(
  name: str,
  *,
  options: Mapping[str, Mapping[str, Any]] = OPTIONS,
  also: Iterable[str] = (),
) -> dict[str, Any]:
  """A mechanism with its options, for a model with a single choice.

  Args:
    name: key of `attention.ATTENTIONS`.
    options: mechanism -> options; what is not there takes its defaults.
    also: other names that the config knows.

  Returns:
    A dictionary of the name and the options.

  Raises:
    ValueError: an unknown name.
  """
  if name not in ATTENTIONS:
    raise ValueError(f"attention: {one_of(name, [*ATTENTIONS, *also])}")
  return {"name": name, **options.get(name, {})}


def choose(name: str, *, also: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
  """Uses a mechanism wherever it can work, and dense where it cannot.

  Args:
    name: key of `attention.ATTENTIONS`.
    also: other names that the config knows.

  Returns:
    'encoder_attention', 'decoder_attention' and 'cross_attention', each a
    dictionary of the name and its options.

  Raises:
    ValueError: an unknown name.
  """
  chosen = one(name, also=also)
  supports = ATTENTIONS[name](**OPTIONS.get(name, {})).supports
  # A config evaluates by generating, so its decoder decodes as well.
  extra = {"decoder_attention": {"decode"}}
  return {
    slot: dict(chosen)
    if needs.keys() | extra.get(slot, set()) <= supports
    else {"name": "dense"}
    for slot, needs in NEEDS.items()
  }
