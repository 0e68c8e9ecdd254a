"""Mechanisms as configs choose them, and the capabilities that models need."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import inspect
import types
from typing import Annotated, Any, ClassVar, cast

import numpy as np
from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from attention import ATTENTIONS, Attention
from attention import mechanism as mechanisms
from settings.fields import rest
from settings.typed import format_mechanism, mechanism, split

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
"""Config field -> capability that its mechanism needs -> its description."""

GENERATING = {
  "decoder_attention": {"decode": "decode token by token"},
}
"""Further capabilities that generation needs."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """A mechanism by name, with its options.

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
    # `_build` remembers import paths, which a name from data must not follow.
    mechanisms.check_imports(self.name)
    self.build()

  def __hash__(self):
    return hash((self.name, tuple(sorted(self.options.items()))))

  def build(self) -> Attention:
    """Returns the mechanism; equal configs give the same object."""
    return _build(self)

  @property
  def spelled(self) -> str:
    """The mechanism as typed on the command line: 'sliding_window:window=8'."""
    return format_mechanism(self.name, self.options)

  @property
  def all_options(self) -> Mapping[str, Any]:
    """The options, with the factory's defaults for those that are not set."""
    parameters = inspect.signature(mechanisms.find(self.name)).parameters
    defaults = {
      name: parameter.default
      for name, parameter in parameters.items()
      if parameter.default is not parameter.empty
    }
    return {**defaults, **self.options}


def _by_name(chosen: Any) -> Any:
  """Parses a word as the name of a mechanism, and '[a, b]' as a list of names.

  A name may have options, 'sliding_window:window=8'.
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


class AttentionFields:
  """Base class of configs whose fields choose the mechanisms of their layers.

  Each field is None, a mechanism, or several that layers take in turn.

  Attributes:
    attention_fields: names of these fields.
  """

  attention_fields: ClassVar[tuple[str, ...]] = ("encoder_attention",)

  def fill_attention_fields(
    self, needs: Mapping[str, Mapping[str, str]] = NEEDS
  ) -> None:
    """Fills empty fields with dense attention, and checks the others.

    Args:
      needs: field -> capability that its mechanisms need -> its description.

    Raises:
      ValueError: a list is empty, or a mechanism lacks a capability.
    """
    for field in self.attention_fields:
      chosen = getattr(self, field)
      if chosen is None:
        object.__setattr__(self, field, AttentionConfig("dense"))
      elif chosen == ():
        raise ValueError(f"{field}: expected at least one mechanism, got none")
      for one in self.attentions[field]:
        check_supports(field, one, needs[field])

  @property
  def attentions(self) -> dict[str, tuple[AttentionConfig, ...]]:
    """The mechanisms of each field, which layers take in turn."""
    return {
      field: chosen if isinstance(chosen, tuple) else (chosen,)
      for field in self.attention_fields
      for chosen in [getattr(self, field)]
    }

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of every layer to which the field applies."""
    chosen = self.attentions[field]
    count = cast(Any, self).num_layers
    return tuple(chosen[i % len(chosen)] for i in range(count))


def slots(config: Any) -> str:
  """Names the mechanisms of a model: 'linformer · dense · linformer'.

  The order is encoder self-attention, decoder self-attention, cross-attention. These
  are the mechanisms of the model, which may differ from those that were typed.

  Args:
    config: the config of a model.
  """
  return " · ".join(names(chosen) for chosen in config.attentions.values())


def names(chosen: Iterable[AttentionConfig]) -> str:
  """Names mechanisms that layers take in turn: 'dense', or 'dense + linear'."""
  return " + ".join(one.name for one in chosen)


def check_supports(
  field: str, config: AttentionConfig, needs: Mapping[str, str]
) -> None:
  """Raises ValueError if a mechanism lacks a capability that its field needs."""
  for capability in missing(config.build(), needs):
    able = ", ".join(mechanisms.supporting(ATTENTIONS, capability))
    raise ValueError(
      f"{field}: {config.name} cannot {needs[capability]}; one of {able} can"
    )


def missing(attention: Attention, needs: Iterable[str]) -> list[str]:
  """Returns the capabilities among `needs` that a mechanism lacks."""
  return [need for need in needs if not mechanisms.can(attention, need)]


def obstacle(attention: Attention, field: str) -> str:
  """Describes the first capability that generation needs and a mechanism lacks.

  Empty if it lacks none.
  """
  needs = NEEDS[field] | GENERATING.get(field, {})
  return next((needs[need] for need in missing(attention, needs)), "")


@functools.cache
def _build(config: AttentionConfig) -> Attention:
  return mechanisms.build(config.name, config.options)


def _frozen(value: Any) -> Any:
  if isinstance(value, np.generic):  # JSON lacks it.
    return value.item()
  if isinstance(value, list | tuple):
    return tuple(_frozen(item) for item in value)
  return value
