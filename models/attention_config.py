"""The mechanisms of a config, and the capabilities that models need from them."""

from collections.abc import Iterable, Mapping
import dataclasses
import functools
import inspect
import types
from typing import Annotated, Any, ClassVar, cast

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from attention import ATTENTIONS, Attention
from attention import mechanism as mechanisms
from attention.names import check_imports
from settings.field_values import plain
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
"""Maps config fields to the capabilities that mechanisms need and their description."""

GENERATING = {
  "decoder_attention": {"decode": "decode token by token"},
}
"""Further capabilities that generation needs."""


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
  """A mechanism by name, with its options.

  Attributes:
    name: a key of `attention.ATTENTIONS`, or 'package.module:factory'.
    options: keyword arguments of that factory; lists and arrays become tuples.

  Raises:
    ValueError: the name or an option is unknown, an option is missing, or the factory
      rejects a value. The message starts with `name` or the option.
  """

  name: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  _rest = rest("options")

  def __post_init__(self):
    options = {key: _freeze(value) for key, value in self.options.items()}
    for key, value in options.items():
      if isinstance(value, Mapping):
        raise ValueError(
          f"{key}: expected a number, text, true, false or a list, got {value!r}"
        )
    object.__setattr__(self, "options", types.MappingProxyType(options))
    # On every call, because `_build` caches mechanisms of import paths, which a name
    # in a file of weights must not use.
    check_imports(self.name)
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


def _parse_mechanisms(value: Any) -> Any:
  """Parses the name of a mechanism, or a list of names such as '[a, b]'.

  A name may have options, as in 'sliding_window:window=8'.
  """
  if isinstance(value, list):
    return tuple(map(_parse_mechanisms, value))
  if not isinstance(value, str):
    return value
  if value.startswith("[") and value.endswith("]"):
    return tuple(map(_parse_mechanisms, split(value[1:-1])))
  if len(split(value)) > 1:
    raise PydanticCustomError(
      "list", "several names are a list; expected [{names}]", {"names": value}
    )
  try:
    name, options = mechanism(value)
  except ValueError as error:
    message, _, _ = str(error).partition(", got ")
    raise PydanticCustomError(
      "word", "{message}", {"message": message}
    ) from None
  return {"name": name, **options}


Layers = Annotated[
  AttentionConfig | tuple[AttentionConfig, ...],
  BeforeValidator(_parse_mechanisms),
]
"""One mechanism for all layers, or several that the layers take in turn."""


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
      value = getattr(self, field)
      if value is None:
        object.__setattr__(self, field, AttentionConfig("dense"))
      elif value == ():
        raise ValueError(f"{field}: expected at least one mechanism, got none")
      for config in self.attentions[field]:
        check_supports(field, config, needs[field])

  @property
  def attentions(self) -> dict[str, tuple[AttentionConfig, ...]]:
    """The mechanisms of each field, which layers take in turn."""
    return {
      field: value if isinstance(value, tuple) else (value,)
      for field in self.attention_fields
      for value in [getattr(self, field)]
    }

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of each layer to which the field applies."""
    mechanisms = self.attentions[field]
    count = cast(Any, self).num_layers
    return tuple(mechanisms[i % len(mechanisms)] for i in range(count))


def slots(config: Any) -> str:
  """Names the mechanisms of a model: 'linformer · dense · linformer'.

  The order is encoder self-attention, decoder self-attention, cross-attention. The
  mechanisms of a model may differ from those that a user typed.

  Args:
    config: the config of a model.
  """
  return " · ".join(map(names, config.attentions.values()))


def names(configs: Iterable[AttentionConfig]) -> str:
  """Names mechanisms that layers take in turn: 'dense', or 'dense + linear'."""
  return " + ".join(config.name for config in configs)


def check_supports(
  field: str, config: AttentionConfig, needs: Mapping[str, str]
) -> None:
  """Raises ValueError if a mechanism lacks a capability that its field needs."""
  for capability in missing(config.build(), needs):
    alternatives = ", ".join(mechanisms.supporting(ATTENTIONS, capability))
    raise ValueError(
      f"{field}: {config.name} cannot {needs[capability]}; one of {alternatives} can"
    )


def missing(attention: Attention, needs: Iterable[str]) -> list[str]:
  """Returns the capabilities among `needs` that a mechanism lacks."""
  return [need for need in needs if not mechanisms.can(attention, need)]


def obstacle(attention: Attention, field: str) -> str:
  """Describes the first capability that generation needs and a mechanism lacks.

  The description is '' if the mechanism lacks none.
  """
  needs = NEEDS[field] | GENERATING.get(field, {})
  return next((needs[need] for need in missing(attention, needs)), "")


@functools.cache
def _build(config: AttentionConfig) -> Attention:
  return mechanisms.build(config.name, config.options)


def _freeze(value: Any) -> Any:
  value = plain(value)
  if isinstance(value, list | tuple | range):
    return tuple(_freeze(item) for item in value)
  return value
