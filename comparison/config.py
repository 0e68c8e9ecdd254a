"""What is compared: mechanisms, tasks, seeds, and what is held equal."""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Any

from attention import ATTENTIONS
from training import config as config_lib
from training.config import ConfigError


@dataclasses.dataclass(frozen=True)
class Comparison:
  """A comparison, validated.

  Attributes:
    tasks: names of files in configs/, without '.py', separated by commas.
    attention: mechanisms, separated by commas; 'all' is every one there is.
    seeds: whole numbers, separated by commas.
    match_parameters: give every model the parameters of the one with dense
      attention, by the width of its feed-forward layers.
    overrides: leaves of the runs' configs that all runs take: every section or
      leaf that is none of the above, as `num_steps` or `model.num_layers`.

  Raises:
    ValueError: a value is wrong; the message starts with the field.
  """

  tasks: str
  attention: str = "all"
  seeds: str = "0"
  match_parameters: bool = True
  overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    for task in self.task_names:
      if not Path(f"configs/{task}.py").is_file():
        raise ValueError(f"tasks: no file configs/{task}.py for {task!r}")
    for name in self.mechanisms:
      if name not in ATTENTIONS:
        raise ValueError(
          f"attention: no mechanism {name!r}; "
          f"{config_lib.nearest(name, ATTENTIONS)}"
        )
    for seed in _split(self.seeds):
      if not seed.isdecimal():
        raise ValueError(f"seeds: expected whole numbers, got {seed!r}")
    for field in ("tasks", "attention", "seeds"):
      values = _split(getattr(self, field))
      if not values or len(set(values)) < len(values):
        raise ValueError(
          f"{field}: expected at least one, each once, got "
          f"{getattr(self, field)!r}"
        )

  @property
  def task_names(self) -> list[str]:
    """Files of configs/."""
    return _split(self.tasks)

  @property
  def mechanisms(self) -> list[str]:
    """Keys of `ATTENTIONS`."""
    everything = self.attention == "all"
    return list(ATTENTIONS) if everything else _split(self.attention)

  @property
  def seed_numbers(self) -> list[int]:
    """Seeds as numbers."""
    return [int(seed) for seed in _split(self.seeds)]


def parse(mapping: Mapping[str, Any]) -> Comparison:
  """Validates a config, a ConfigDict or parsed JSON.

  Raises:
    ConfigError: the first fault found.
  """
  return config_lib.build(Comparison, dict(mapping.items()))


def shared(comparison: Comparison) -> dict[str, Any]:
  """What all runs of a comparison share, JSON-ready."""
  return {
    "tasks": comparison.tasks,
    "match_parameters": comparison.match_parameters,
    **flat(comparison.overrides),
  }


def flat(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
  """`{'a': {'b': 1}}` to `{'a.b': 1}`.

  Raises:
    ConfigError: a leaf is no number, text or truth value.
  """
  leaves = {}
  for name, value in mapping.items():
    if hasattr(value, "items"):
      leaves.update(flat(value, f"{prefix}{name}."))
    elif isinstance(value, (bool, int, float, str)):
      leaves[prefix + name] = value
    else:
      raise ConfigError(
        f"config.{prefix}{name}: expected a number, text, true or "
        f"false, got {value!r}"
      )
  return leaves


def _split(text: str) -> list[str]:
  return [part.strip() for part in text.split(",") if part.strip()]
