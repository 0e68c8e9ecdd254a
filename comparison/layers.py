"""Which mechanisms layers take: of a variant, and of lists in `across`.

Sizes are those of the config file, which `train.py` would read, so that a layer has
what a row of its mechanism alone has.
"""

from collections.abc import Mapping, Sequence
import importlib
from typing import Any

from comparison.config import LAYERS
import models
from settings.errors import ConfigError, one_line
from settings.leaves import Leaves
from settings.typed import mechanism, spelled, split

BASELINE = "dense"
"""The mechanism whose number of parameters the others are given."""


def mapping(task: str, attention: str) -> dict[str, Any]:
  """What the file of a task makes of mechanisms."""
  try:
    file = importlib.import_module(f"configs.{task.replace('/', '.')}")
    return file.get_config(attention).to_dict()
  # A file of something else than one task, of other names than mechanisms, or of a
  # project that is not here.
  except (AttributeError, ImportError, TypeError, ValueError) as error:
    raise ConfigError(
      f"config.tasks: configs/{task}.py has no config for {attention!r}: "
      f"{one_line(error)}"
    ) from error


def is_slot(leaf: str) -> bool:
  """Whether a leaf is all that fills a slot: 'model.decoder_attention'."""
  return leaf.startswith("model.") and leaf.endswith("_attention")


def check_is_there(name: str, across: Leaves, model: models.Config) -> None:
  """Raises ConfigError where `across` fills every slot that a row's mechanism had."""
  slots = [leaf for leaf in across if is_slot(leaf)]
  layers = [layer.name for x in model.attentions.values() for layer in x]
  if slots and name not in (BASELINE, *layers):
    raise ConfigError(
      f"config.across.{slots[0]} has the mechanisms; expected "
      f"config.attention={BASELINE}"
    )


def _filled(task: str, typed: str, leaves: Leaves) -> dict[str, list[Any]]:
  """What a config file puts into the slots that it fills with what was typed.

  Args:
    task: whose file it is.
    typed: mechanisms with commas, which layers take in turn.
    leaves: of the run; a slot that they fill is left out.

  Returns:
    Leaf of a slot -> the names and options of its layers, sizes among them.
  """
  names = [mechanism(word)[0] for word in split(typed)]
  filled = {}
  for field, chosen in mapping(task, typed)["model"].items():
    leaf = f"model.{field}"
    if is_slot(leaf) and not {leaf, f"{leaf}.name"} & leaves.keys():
      layers = [*chosen] if isinstance(chosen, list | tuple) else [chosen]
      if [layer["name"] for layer in layers] == names:
        filled[leaf] = layers
  return filled


def _in_turn(layers: Sequence[Mapping[str, Any]]) -> str:
  """Layers as one types them: '[sliding_window:window=8,delta]'."""
  words = [
    spelled(layer["name"], {k: x for k, x in layer.items() if k != "name"})
    for layer in layers
  ]
  return f"[{','.join(words)}]"


def spelled_across(task: str, across: Leaves) -> Leaves:
  """Lists of mechanisms in `across` as text, with the sizes of the config file."""
  text = {}
  for leaf, value in across.items():
    if isinstance(value, tuple) and is_slot(leaf):
      typed = ",".join(value)
      layers = _filled(task, typed, {}).get(leaf)
      text[leaf] = f"[{typed}]" if layers is None else _in_turn(layers)
  return across | text


def options_of(
  task: str, name: str, leaves: Leaves, options: Mapping[str, Any]
) -> Leaves:
  """A variant's options, as leaves of the slots that the mechanism is in.

  Raises:
    ConfigError: no slot can have its layers.
  """
  if not options:
    return {}
  if LAYERS in options:
    filled = _filled(task, options[LAYERS], leaves)
    if not filled:
      raise ConfigError(
        f"layers: no slot of configs/{task}.py can have all of "
        f"{options[LAYERS]}; expected layers that one of its slots can have"
      )
    # As the file has it, dense is where one of the layers cannot be.
    others = _filled(task, name, leaves).keys() - filled.keys()
    layers = {leaf: _in_turn(layers) for leaf, layers in filled.items()}
    return layers | dict.fromkeys(others, BASELINE)
  return {
    f"{leaf}.{option}": value
    for leaf in _filled(task, spelled(name, options), leaves)
    for option, value in options.items()
  }


def chosen_options(config: models.Config, mechanism: str) -> str:
  """Options in the first slot that a mechanism fills: 'window=8'.

  Of layers that differ they stand behind their names: 'sliding_window:window=8'.
  """
  for chosen in config.attentions.values():
    if len({layer.name for layer in chosen}) > 1:
      words = [layer.spelled for layer in chosen if layer.options]
      return ", ".join(dict.fromkeys(words))
    for layer in chosen:
      if layer.name == mechanism:
        return ", ".join(f"{k}={v}" for k, v in sorted(layer.options.items()))
  return ""
