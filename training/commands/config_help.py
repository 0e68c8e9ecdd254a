"""Describes every field of a config, with its value, from the config dataclasses.

`python train.py --config=configs/copy.py --help` prints the fields of one config.
`python -m training.commands.config_help` prints those of all tasks and models, for
docs/config.md.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import inspect
import textwrap
import typing
from typing import Any

import models
import tasks
from training import experiment_config
from training.config import TrainConfig
from training.experiment_config import ExperimentConfig

WIDTH = 78
"""The width of the lines of `--help`."""


def text(mapping: Mapping[str, Any]) -> str:
  """Returns the fields of one config, for `--help`.

  Raises:
    ConfigError: the config is invalid.
  """
  config = experiment_config.parse(mapping)
  return "\n".join(["Fields of this config:", *run_lines(config)])


def run_lines(config: ExperimentConfig) -> list[str]:
  """Returns the fields of a run, its task and its model."""
  return [
    *lines(config.train),
    *lines(config.task, "task."),
    *lines(config.model, "model."),
  ]


def lines(config: Any, section: str = "") -> list[str]:
  """Returns the fields of a config dataclass, each with its value and its meaning.

  Args:
    config: the dataclass.
    section: the prefix of the names of its fields.
  """
  result, indent = [], " " * 6
  for name, _, value, meaning in _fields(config, section):
    result.append(f"  --config.{name}={value}")
    result += textwrap.wrap(
      meaning, WIDTH, initial_indent=indent, subsequent_indent=indent
    )
  return result


def page() -> str:
  """Returns the fields of the run, every task and every model, in Markdown."""
  parts = ["## The run\n", _table(TrainConfig, "")]
  for name, entry in tasks.TASKS.items():
    parts += [f"## Task `{name}`\n", _table(entry.config_type, "task.")]
  kinds: dict[type, list[str]] = {}
  for kind, config_type in models.CONFIGS.items():
    kinds.setdefault(config_type, []).append(f"`{kind}`")
  for config_type, names in kinds.items():
    parts += [f"## Model {', '.join(names)}\n", _table(config_type, "model.")]
  return "\n".join(parts)


def _table(kind: type, section: str) -> str:
  rows = ["| field | type | default | meaning |", "| --- | --- | --- | --- |"]
  for name, type_, value, meaning in _fields(kind, section):
    default = f"`{value}`" if value else "needed"
    type_text = _describe_type(type_)
    rows.append(f"| `{name}` | {type_text} | {default} | {meaning} |")
  return "\n".join(rows) + "\n"


def _fields(config: Any, section: str) -> Iterator[tuple[str, Any, str, str]]:
  """Yields name, type, value and meaning of the fields of a config or config type."""
  kind = config if isinstance(config, type) else type(config)
  texts = meanings(kind)
  types = typing.get_type_hints(kind, include_extras=True)
  for field in dataclasses.fields(kind):
    value = getattr(config, field.name, field.default)
    if config is kind and dataclasses.is_dataclass(field.default_factory):
      value = field.default_factory
    name = section + field.name
    if isinstance(value, Mapping):
      continue  # Options of a mechanism: its factory documents them.
    if dataclasses.is_dataclass(value) and not hasattr(value, "build"):
      yield from _fields(value, f"{name}.")
    else:
      meaning = texts.get(field.name, "")
      yield name, types[field.name], _format_value(value), meaning


def _describe_type(kind: Any) -> str:
  """Describes a type: "int ≥ 1", "'jit' or 'pmap'", "list of int"."""
  parts = typing.get_args(kind)
  if typing.get_origin(kind) is typing.Annotated:
    limits = (
      f" {sign} {'2³¹' if limit == 2**31 else limit}"
      for bound in parts[1:]
      for sign, name in (("≥", "ge"), (">", "gt"), ("≤", "le"), ("<", "lt"))
      if (limit := getattr(bound, name, None)) is not None
    )
    return _describe_type(parts[0]) + ",".join(limits)
  if typing.get_origin(kind) is typing.Literal:
    return " or ".join(map(repr, parts))
  if typing.get_origin(kind) is tuple:
    size = "" if parts[-1] is ... else f"{len(parts)} "
    return f"list of {size}{_describe_type(parts[0])}"
  if parts:
    return " or ".join(map(_describe_type, parts))
  return "None" if kind is type(None) else kind.__name__


def _format_value(value: Any) -> str:
  if hasattr(value, "build"):
    # All options that the command line can set, including those with their defaults.
    options = ", ".join(f"{k}={x!r}" for k, x in value.all_options.items())
    return value.name + (f" ({options})" if options else "")
  if isinstance(value, tuple):
    return "[" + ", ".join(map(_format_value, value)) + "]"
  if value is dataclasses.MISSING:
    return ""
  return repr(value) if value == "" else str(value)


def meanings(kind: type) -> dict[str, str]:
  """Maps fields to their descriptions under "Attributes:" of a class and its bases."""
  texts: dict[str, str] = {}
  for base in kind.__bases__:
    texts |= meanings(base)
  doc = inspect.cleandoc(vars(kind).get("__doc__") or "")
  name = ""
  for line in doc.partition("Attributes:\n")[2].splitlines():
    if not line.startswith("  "):
      break
    if line.startswith("    "):
      texts[name] += f" {line.strip()}"
    else:
      name, _, meaning = line.strip().partition(": ")
      texts[name] = meaning
  return texts


if __name__ == "__main__":
  print(page(), end="")
