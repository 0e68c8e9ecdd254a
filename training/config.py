"""Configs: what a user types becomes frozen, validated dataclasses.

`build` reads any mapping (an `ml_collections.ConfigDict`, parsed JSON) into a
dataclass whose type hints say what is allowed; `to_mapping` is its inverse.
"""

from collections.abc import Mapping
import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal, TypeVar, cast

T = TypeVar("T")


class ConfigError(ValueError):
  """A fault in what the user asked for, told in one line."""


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How parameters are updated.

  Attributes:
    name: 'adamw', or 'adam', which takes no weight decay.
    learning_rate: the peak.
    schedule: after the warm-up: 'constant', 'cosine' down to `final_fraction`
      of the peak at the last step, or 'inverse_sqrt' of the step.
    warmup_steps: steps of linear growth to the peak.
    final_fraction: last learning rate of 'cosine' over the peak.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    weight_decay: decoupled; never applied to biases and norm scales.
    clip_norm: largest global gradient norm; None does not clip.
    accumulate_steps: micro-batches that one batch is split into.
    label_smoothing: share of each target spread over the whole vocabulary.
  """

  name: Literal["adamw", "adam"] = "adamw"
  learning_rate: float = 1e-3
  schedule: Literal["constant", "cosine", "inverse_sqrt"] = "constant"
  warmup_steps: int = 0
  final_fraction: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float | None = None
  accumulate_steps: int = 1
  label_smoothing: float = 0.0

  def __post_init__(self):
    positive = ["learning_rate", "eps", "accumulate_steps"]
    if self.clip_norm is not None:
      positive.append("clip_norm")
    for name in positive:
      _check(self, name, getattr(self, name) > 0, "a value above 0")
    for name in ("warmup_steps", "weight_decay"):
      _check(self, name, getattr(self, name) >= 0, "0 or more")
    for name in ("b1", "b2", "label_smoothing"):
      _check(self, name, 0 <= getattr(self, name) < 1, "at least 0, below 1")
    _check(self, "final_fraction", 0 <= self.final_fraction <= 1, "0 to 1")
    if self.name == "adam" and self.weight_decay:
      raise ValueError(
        f"weight_decay: adam has none, got {self.weight_decay}; set 0 or use "
        "optimizer.name='adamw'"
      )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
  """What the loop needs to know.

  Attributes:
    num_steps: updates in the whole run.
    batch_size: rows of one update, over all devices and micro-batches.
    seed: parameters, data order and dropout follow from it.
    eval_every: steps between evaluations.
    checkpoint_every: steps between checkpoints.
    log_every: steps between lines in `metrics.jsonl`.
    redraw_every: steps between new draws of what the model draws and does not
      train: random features, rotations, blocks; 0 keeps the first.
    parallel: how devices are driven; the numbers are the same.
    decode_method: how held-out examples are decoded at the end.
    optimizer: see `OptimizerConfig`.
  """

  num_steps: int
  batch_size: int
  seed: int = 0
  eval_every: int = 1000
  checkpoint_every: int = 1000
  log_every: int = 100
  redraw_every: int = 0
  parallel: Literal["jit", "pmap"] = "jit"
  decode_method: Literal["greedy", "beam"] = "greedy"
  optimizer: OptimizerConfig = dataclasses.field(
    default_factory=OptimizerConfig
  )

  def __post_init__(self):
    for name in (
      "num_steps",
      "batch_size",
      "eval_every",
      "checkpoint_every",
      "log_every",
    ):
      _check(self, name, getattr(self, name) >= 1, "at least 1")
    _check(self, "redraw_every", self.redraw_every >= 0, "at least 0")
    _check(self, "seed", 0 <= self.seed < 2**31, "0 to 2**31 - 1")
    if self.batch_size % self.optimizer.accumulate_steps:
      raise ValueError(
        f"batch_size: {self.batch_size} rows do not split into "
        f"{self.optimizer.accumulate_steps} equal micro-batches "
        "(optimizer.accumulate_steps)"
      )


def build(
  dataclass_type: type[T], mapping: Mapping[str, Any], path: str = "config"
) -> T:
  """Turns a mapping into a frozen dataclass, checking every leaf.

  Nested mappings become nested dataclasses. The last field whose type is a
  Mapping takes every key that no other field is named after.

  Args:
    dataclass_type: the dataclass; its type hints say what is allowed.
    mapping: leaf name → value.
    path: where the mapping hangs, for messages.

  Returns:
    An instance of `dataclass_type`.

  Raises:
    ConfigError: an unknown key (with the nearest known one), a missing one, a
      wrong type, or a value that `dataclass_type` itself refuses.
  """
  if not isinstance(mapping, Mapping) and not hasattr(mapping, "items"):
    raise ConfigError(f"{path}: expected named leaves, got {mapping!r}")
  hints = typing.get_type_hints(dataclass_type)
  fields = {f.name: f for f in dataclasses.fields(cast(Any, dataclass_type))}
  rest = _rest(dataclass_type)
  known = [name for name in fields if name != rest]
  values, extra = {}, {}
  for key, value in mapping.items():
    if key in known:
      values[key] = _convert(hints[key], value, f"{path}.{key}")
    elif rest is None:
      raise ConfigError(f"{path}.{key}: unknown; {nearest(key, known)}")
    else:
      extra[key] = value
  if rest is not None:
    values[rest] = types.MappingProxyType(extra)
  for name, field in fields.items():
    if name not in values and _required(field):
      raise ConfigError(f"{path}.{name}: missing, and it has no default")
  try:
    return dataclass_type(**values)
  except ConfigError:
    raise
  except ValueError as error:
    raise ConfigError(f"{path}.{error}") from error


def to_mapping(config: Any) -> dict[str, Any]:
  """Turns a dataclass into plain, JSON-ready dictionaries; inverts `build`."""
  mapping: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if dataclasses.is_dataclass(value):
      mapping[field.name] = to_mapping(value)
    elif field.name == _rest(type(config)):
      mapping.update(value)
    elif isinstance(value, Mapping):
      mapping[field.name] = dict(value)
    else:
      mapping[field.name] = list(value) if isinstance(value, tuple) else value
  return mapping


def nearest(name: str, known: typing.Iterable[str]) -> str:
  """Says which known name was probably meant, or lists them all."""
  known = list(known)
  close = difflib.get_close_matches(name, known, n=1)
  if close:
    return f"did you mean {close[0]!r}?"
  return f"known: {', '.join(known)}"


def _check(config: Any, name: str, valid: bool, expected: str) -> None:
  if not valid:
    raise ValueError(
      f"{name}: expected {expected}, got {getattr(config, name)}"
    )


def _is_mapping(hint: Any) -> bool:
  return (typing.get_origin(hint) or hint) in (Mapping, dict)


def _rest(dataclass_type: Any) -> str | None:
  """The field that takes the keys which no field is named after."""
  hints = typing.get_type_hints(dataclass_type)
  names = [field.name for field in dataclasses.fields(dataclass_type)]
  return next((n for n in reversed(names) if _is_mapping(hints[n])), None)


def _required(field: dataclasses.Field) -> bool:
  return (
    field.default is dataclasses.MISSING
    and field.default_factory is dataclasses.MISSING
  )


def _convert(hint: Any, value: Any, path: str) -> Any:
  """Checks `value` against a type hint; lists become tuples, ints floats."""
  if dataclasses.is_dataclass(hint):
    return value if isinstance(value, hint) else build(hint, value, path)
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    return _convert_union(hint, arguments, value, path)
  if origin is tuple and isinstance(value, (list, tuple)):
    if arguments[-1] is Ellipsis:
      arguments = arguments[:1] * len(value)
    if len(arguments) == len(value):
      return tuple(
        _convert(h, v, f"{path}[{i}]")
        for i, (h, v) in enumerate(zip(arguments, value, strict=True))
      )
  elif origin is Literal:
    if value in arguments:
      return value
  elif hint is Any:
    return value
  elif _is_mapping(hint):
    if hasattr(value, "items"):
      return types.MappingProxyType(dict(value.items()))
    raise ConfigError(f"{path}: expected named leaves, got {value!r}")
  elif hint is float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
      if math.isfinite(value):
        return float(value)
      raise ConfigError(f"{path}: expected a finite number, got {value}")
  elif isinstance(value, hint) and (hint is bool or type(value) is not bool):
    return value
  raise ConfigError(f"{path}: expected {_describe(hint)}, got {value!r}")


def _convert_union(
  hint: Any, members: tuple[Any, ...], value: Any, path: str
) -> Any:
  if value is None and type(None) in members:
    return None
  members = tuple(m for m in members if m is not type(None))
  if len(members) == 1:
    return _convert(members[0], value, path)
  # An exact type first, so that `float | int` keeps an int as it is.
  for member in sorted(members, key=lambda m: m is not type(value)):
    try:
      return _convert(member, value, path)
    except ConfigError:
      pass
  raise ConfigError(f"{path}: expected {_describe(hint)}, got {value!r}")


def _describe(hint: Any) -> str:
  origin, arguments = typing.get_origin(hint), typing.get_args(hint)
  if origin is Literal:
    return "one of " + ", ".join(repr(a) for a in arguments)
  if origin in (typing.Union, types.UnionType):
    return " or ".join(_describe(a) for a in arguments)
  if origin is tuple:
    inner = ", ".join("…" if a is ... else _describe(a) for a in arguments)
    return f"({inner})"
  names = {float: "a number", type(None): "None", bool: "true or false"}
  return names.get(hint, getattr(hint, "__name__", str(hint)))
