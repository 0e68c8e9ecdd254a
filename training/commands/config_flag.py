"""The flag --config=FILE.py, with overrides of fields on the command line."""

from pathlib import Path
import re
import runpy
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from settings.errors import ConfigError, one_line
from settings.suggest import missing_file
from training.commands import entry

_NAME = "config"
_OVERRIDE = re.compile(rf"--?(?:no)?{_NAME}\.([^=]*)(?:=(.*))?", re.DOTALL)


def define(help_string: str) -> flags.FlagHolder:
  """Defines the flag; `entry.load_config` reads it.

  The command line may set fields and sections that are not in the file. The config is
  therefore not locked: a lock would refuse fields that the file leaves at their
  defaults, and options of a mechanism that the command line chooses. The validation of
  the config reports unknown fields by their full names.
  """
  try:
    holder = config_flags.DEFINE_config_file(
      _NAME,
      help_string=help_string,
      lock_config=False,
      accept_new_attributes=True,
    )
  # config_flags reads overrides from a --flagfile.
  except flags.Error as error:
    entry.fail(one_line(error), 2)
  flag = flags.FLAGS[_NAME]
  flag.parser = _WithSections(flag.parser)
  return holder


def typed_fields(holder: flags.FlagHolder) -> list[str]:
  """Returns the full names of the fields that the command line sets."""
  return list(config_flags.get_override_values(flags.FLAGS[holder.name]))


def load(argument: str) -> ConfigDict:
  """Loads the config `FILE.py` or `FILE.py:ARGUMENT`, as the flag does.

  Raises:
    ConfigError: the file does not exist, or its code raises.
  """
  path, _, parameter = argument.partition(":")
  if not Path(path).is_file():
    raise ConfigError(f"config: {missing_file(path)}")
  try:
    module = runpy.run_path(path)
    return module["get_config"](*filter(None, [parameter]))
  # A config file may raise anything, and may have no such function.
  except Exception as error:
    _check_argument(error, argument)
    raise ConfigError(f"config: {argument}: {one_line(error)}") from error


def _check_argument(error: Exception, argument: str) -> None:
  """Raises ConfigError if a file that takes no argument got one."""
  if "get_config() takes 0 positional arguments" in str(error):
    path, _, parameter = argument.partition(":")
    raise ConfigError(
      f"config: {path} takes nothing after a colon, got {parameter!r}"
    ) from error


class _WithSections(flags.ArgumentParser):
  """Adds missing sections of overrides to a config.

  `accept_new_attributes` adds fields, but not sections: an override in a missing
  section would raise a KeyError with only the first part of the section's name.
  """

  def __init__(self, parser: flags.ArgumentParser):
    self._parser = parser

  def parse(self, argument: str) -> Any:
    """Loads a config file and adds sections for the overrides."""
    file = argument.partition(":")[0]
    if not file.endswith(".py"):
      raise ConfigError(
        f"--{_NAME}: expected a config file, such as configs/copy.py, got "
        f"{file!r}"
      )
    try:
      config = self._parser.parse(argument)
    except TypeError as error:
      _check_argument(error, argument)
      raise
    if not isinstance(config, ConfigDict):  # The file could not be read.
      return config
    for word in sys.argv[1:]:
      if override := _OVERRIDE.match(word):
        _add_sections(config, override[1], override[2])
    return config

  def flag_type(self) -> str:
    """Returns the name of the type in --help."""
    return self._parser.flag_type()


def _add_sections(config: ConfigDict, field: str, value: str | None) -> None:
  """Adds the missing sections of a field's full name.

  `None` may replace any value: `--config.optimizer.clip_norm=None`.

  A name, or a list of names, may replace a section:
  `--config.model.decoder_attention=flash` or `=[gated_delta,flash]`. `config_flags`
  alone accepts only a value of the field's type. The validation of the config refuses
  names elsewhere.
  """
  if not all(name.isidentifier() for name in field.split(".")):
    raise ConfigError(
      f"--{_NAME}.{field}: expected names separated by dots, such as "
      f"--{_NAME}.model.num_layers"
    )
  *names, last = field.split(".")
  section, path = config, _NAME
  for name in names:
    path = f"{path}.{name}"
    if name not in section:
      with section.unlocked():
        section[name] = ConfigDict()
    section = section[name]
    if not isinstance(section, ConfigDict):
      raise ConfigError(
        f"{_NAME}.{field}: unknown; {path} is one value and has no fields"
      )
  old = section.get(last)
  items = old if isinstance(old, list | tuple) else [old]
  if value == "None" and last in section:
    del section[last]  # A new field takes any value.
  elif value is not None and any(
    isinstance(x, ConfigDict | dict) for x in items
  ):
    with section.unlocked(), section.ignore_type():
      section[last] = ""
