"""A mechanism as a config chooses it, and what a model's slots ask of it."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import types
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from attention import ATTENTIONS, Attention
from attention import mechanism as mechanisms
from settings.fields import rest
from settings.typed import mechanism, spelled, split

# What each slot asks of a mechanism, and how its absence reads.
NEEDS = {
  "encoder_attention": {
    "bidirectional": "attend in both directions",
    "mask": "honour a key mask",
  },
  "decoder_attention": {"causal": "be causal"},
  "cross_attention": {
    "cross": "attend to another sequence",
    "rowwise": "attend from one position at a time",
    "mask": "honour a key mask",
  },
}
"""Choice of a model -> what its mechanism must support, and that in words."""

GENERATING = {
  "decoder_attention": {"decode": "decode token by token"},
}
"""Likewise, where a task generates."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """One mechanism by name, with its own options.

  Attributes:
    name: a key of `attention.ATTENTIONS`, or 'package.module:factory'.
    options: keyword arguments of that factory; lists become tuples.

  Raises:
    ValueError: an unknown name or option, a missing one, or a value that the
      factory refuses. The message starts with `name` or the option.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  _rest = rest("options")

  def __post_init__(self):
    options = {key: _frozen(value) for key, value in self.options.items()}
    for key, value in options.items():
      if isinstance(value, Mapping):
        raise ValueError(
          f"{key}: expected a number, text, true, false or a list, got {value!r}"
        )
    object.__setattr__(self, "options", types.MappingProxyType(options))
    self.build()

  def __hash__(self):
    return hash((self.name, tuple(sorted(self.options.items()))))

  def build(self) -> Attention:
    """Returns the mechanism; equal configs give the same object."""
    mechanisms.check_imports(self.name)
    return _build(self)

  @property
  def spelled(self) -> str:
    """As one types it: 'sliding_window:window=8'."""
    return spelled(self.name, self.options)


def _by_name(chosen: Any) -> Any:
  """A word in place of a section chooses by name, and '[a, b]' is a list of words.

  A word may have options, 'sliding_window:window=8'.
  """
  if isinstance(chosen, list):
    return tuple(_by_name(one) for one in chosen)
  if not isinstance(chosen, str):
    return chosen
  if chosen.startswith("[") and chosen.endswith("]"):
    return tuple(map(_by_name, split(chosen[1:-1])))
  if len(split(chosen)) > 1:
    raise PydanticCustomError(
      "list", "several names are a list; expected [{names}]", {"names": chosen}
    )
  try:
    name, options = mechanism(chosen)
  except ValueError as error:
    told, _, _ = str(error).partition(", got ")
    raise PydanticCustomError("word", "{told}", {"told": told}) from None
  return {"name": name, **options}


Layers = Annotated[
  AttentionConfig | tuple[AttentionConfig, ...], BeforeValidator(_by_name)
]
"""One mechanism for every layer, or several that the layers take in turn."""


class AttentionSlots:
  """What a config has whose mechanisms are fields named after their slots.

  A field is None, a mechanism, or several that layers take in turn.

  Attributes:
    slot_fields: names of the fields.
  """

  slot_fields: ClassVar[tuple[str, ...]] = ("encoder_attention",)

  def fill_slots(self, needs: Mapping[str, Mapping[str, str]] = NEEDS) -> None:
    """Puts dense where nothing is chosen, and checks what is.

    Args:
      needs: slot -> what its mechanisms must support, and that in words.

    Raises:
      ValueError: an empty list, or a mechanism that cannot serve.
    """
    for field in self.slot_fields:
      chosen = getattr(self, field)
      if chosen is None:
        object.__setattr__(self, field, AttentionConfig("dense"))
      elif chosen == ():
        raise ValueError(f"{field}: expected at least one mechanism, got none")
      for one in self.attentions[field]:
        check_supports(field, one, needs[field])

  @property
  def attentions(self) -> dict[str, tuple[AttentionConfig, ...]]:
    """The mechanisms of each slot, which layers take in turn."""
    return {
      field: chosen if isinstance(chosen, tuple) else (chosen,)
      for field in self.slot_fields
      for chosen in [getattr(self, field)]
    }

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of every layer that has the slot `field`."""
    chosen = self.attentions[field]
    count = cast(Any, self).num_layers
    return tuple(chosen[i % len(chosen)] for i in range(count))


def slots(config: Any) -> str:
  """Which mechanism fills which slot: 'linformer · dense · linformer'.

  Read from what the model is made of, not from the name that was asked for. The
  order is encoder, decoder, cross-attention; a model with one has one name.

  Args:
    config: of a model.
  """
  return " · ".join(names(chosen) for chosen in config.attentions.values())


def names(chosen: Iterable[AttentionConfig]) -> str:
  """The mechanisms of a slot: 'dense', or 'dense + linear' in turn."""
  return " + ".join(one.name for one in chosen)


def check_supports(
  field: str, config: AttentionConfig, needs: Mapping[str, str]
) -> None:
  """Raises ValueError where a mechanism lacks what its slot needs."""
  for capability in missing(config.build(), needs):
    able = ", ".join(mechanisms.supporting(ATTENTIONS, capability))
    raise ValueError(
      f"{field}: {config.name} cannot {needs[capability]}; one of {able} can"
    )


def missing(attention: Attention, needs: Iterable[str]) -> list[str]:
  """The capabilities among `needs` that a mechanism does not have."""
  return [need for need in needs if not mechanisms.can(attention, need)]


def obstacle(attention: Attention, slot: str) -> str:
  """What a slot of a model that generates asks in vain; empty where it can serve."""
  needs = NEEDS[slot] | GENERATING.get(slot, {})
  return next((needs[need] for need in missing(attention, needs)), "")


@functools.cache
def _build(config: AttentionConfig) -> Attention:
  return mechanisms.build(config.name, config.options)


def _frozen(value: Any) -> Any:
  if isinstance(value, list | tuple):
    return tuple(_frozen(item) for item in value)
  return value
