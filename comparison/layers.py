"""The mechanisms of each layer, for variants and for lists in `across`.

Their sizes come from the config file that `train.py` reads, so a layer has the same
sizes as in a row that uses only its mechanism.
"""

from collections.abc import Mapping, Sequence
import importlib
from typing import Any

from comparison.config import LAYERS
import models
from settings.errors import ConfigError, one_line
from settings.field_values import FieldValues
from settings.typed import format_mechanism, format_options, mechanism, split
from training.experiment_config import ExperimentConfig

BASELINE = "dense"
"""The mechanism whose parameter count the others match."""


def mapping(task: str, attention: str) -> dict[str, Any]:
  """Returns the config of a task's file for the given mechanisms."""
  try:
    file = importlib.import_module(f"configs.{task.replace('/', '.')}")
    return file.get_config(attention).to_dict()
  # The file may be the config of a comparison, may expect something other than
  # mechanisms, or may belong to a project that is not installed.
  except (AttributeError, ImportError, TypeError, ValueError) as error:
    raise ConfigError(
      f"config.tasks: configs/{task}.py has no config for {attention!r}: "
      f"{one_line(error)}"
    ) from error


def is_attention_field(field: str) -> bool:
  """Returns whether a field sets an attention module: 'model.decoder_attention'."""
  return field.startswith("model.") and field.endswith("_attention")


def check_mechanism_is_used(
  name: str, across: FieldValues, config: ExperimentConfig
) -> None:
  """Checks that a row has its mechanism.

  Raises:
    ConfigError: `across` replaces the mechanism in every module, or it is plain
      'dense', which keeps the mechanisms of published weights.
  """
  model = config.model
  fields = [field for field in across if is_attention_field(field)]
  layers = [layer.name for x in model.attentions.values() for layer in x]
  if fields and name not in (BASELINE, *layers):
    raise ConfigError(
      f"config.across.{fields[0]} already sets the mechanisms; expected "
      f"config.attention={BASELINE}"
    )
  keeps_others = config.weights and not fields and {*layers} != {BASELINE}
  if keeps_others and name == BASELINE:
    raise ConfigError(
      f"config.attention: {BASELINE} keeps the mechanisms of config.model.weights, "
      f"{models.slots(model)}; expected flash, which is exact attention in every "
      "layer; swap.py has the model itself as a row"
    )


def _modules_with(
  task: str, typed: str, fields: FieldValues
) -> dict[str, list[Any]]:
  """Returns the attention modules for which a config file uses the given mechanisms.

  Args:
    task: the task of the file.
    typed: mechanisms separated by commas, which layers use in turn.
    fields: config fields of the run; modules whose mechanism they set are omitted.

  Returns:
    Maps the config fields of modules to the names and options of their layers,
    including sizes.
  """
  names = [mechanism(word)[0] for word in split(typed)]
  modules = {}
  for name, value in mapping(task, typed)["model"].items():
    field = f"model.{name}"
    if (
      is_attention_field(field) and not {field, f"{field}.name"} & fields.keys()
    ):
      layers = [*value] if isinstance(value, list | tuple) else [value]
      if [layer["name"] for layer in layers] == names:
        modules[field] = layers
  return modules


def _format_layers(layers: Sequence[Mapping[str, Any]]) -> str:
  """Formats layers as on the command line: '[sliding_window:window=8,delta]'."""
  words = [
    format_mechanism(
      layer["name"], {k: x for k, x in layer.items() if k != "name"}
    )
    for layer in layers
  ]
  return f"[{','.join(words)}]"


def format_across(task: str, across: FieldValues) -> FieldValues:
  """Formats lists of mechanisms in `across`, with the sizes of the config file."""
  text = {}
  for field, value in across.items():
    if isinstance(value, tuple) and is_attention_field(field):
      typed = ",".join(value)
      layers = _modules_with(task, typed, {}).get(field)
      text[field] = f"[{typed}]" if layers is None else _format_layers(layers)
  return across | text


def options_of(
  task: str, name: str, fields: FieldValues, options: Mapping[str, Any]
) -> FieldValues:
  """Returns a variant's options as config fields of the modules with its mechanism.

  Raises:
    ConfigError: no attention module supports all of its layers.
  """
  if not options:
    return {}
  if LAYERS in options:
    modules = _modules_with(task, options[LAYERS], fields)
    if not modules:
      raise ConfigError(
        f"layers: no attention module of configs/{task}.py can have all of "
        f"{options[LAYERS]}; expected layers that one of its modules can have"
      )
    # As in the file, a module that does not support one of the layers uses dense
    # attention.
    others = _modules_with(task, name, fields).keys() - modules.keys()
    layers = {
      field: _format_layers(layers) for field, layers in modules.items()
    }
    return layers | dict.fromkeys(others, BASELINE)
  return {
    f"{field}.{option}": value
    for field in _modules_with(task, format_mechanism(name, options), fields)
    for option, value in options.items()
  }


def first_options(config: models.Config, mechanism: str) -> str:
  """Returns all options in the first module with a mechanism: 'window=8:dilation=1'.

  If layers differ, the options follow their names: 'sliding_window:window=8,linear'.
  Options that were not set have the mechanism's defaults.
  """
  for layers in config.attentions.values():
    if len({layer.name for layer in layers}) > 1:
      words = [
        format_mechanism(layer.name, layer.all_options) for layer in layers
      ]
      return ",".join(dict.fromkeys(words))
    for layer in layers:
      if layer.name == mechanism:
        return format_options(layer.all_options)
  return ""
