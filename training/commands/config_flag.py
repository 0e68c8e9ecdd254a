"""The flag --config=FILE.py, of which any leaf can be overridden."""

from pathlib import Path
import re
import runpy
import sys
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from settings.errors import ConfigError, one_line
from settings.suggest import no_file
from training.commands import entry

_NAME = "config"
_OVERRIDE = re.compile(rf"--?(?:no)?{_NAME}\.([^=]*)(=?)")


def define(help_string: str, default: str | None = None) -> flags.FlagHolder:
  """Defines the flag; `entry.load_config` reads it.

  A leaf that the file does not have is accepted, in a new section too. The lock of
  `config_flags` knows the leaves of the file alone: it would refuse those that have
  a default and were left out, and options of a mechanism that was typed. One that
  nobody knows is found where the config is validated, which names it in full.
  """
  try:
    holder = config_flags.DEFINE_config_file(
      _NAME,
      help_string=help_string,
      lock_config=False,
      accept_new_attributes=True,
    )
  except flags.Error as error:  # It looks for overrides in a --flagfile.
    entry.fail(one_line(error), 2)
  flag = flags.FLAGS[_NAME]
  flag.parser = _WithSections(flag.parser)
  if default is not None:
    flags.FLAGS.set_default(_NAME, default)
  return holder


def typed(holder: flags.FlagHolder) -> list[str]:
  """Leaves that the command line sets, by full name: 'model.num_layers'."""
  return list(config_flags.get_override_values(flags.FLAGS[holder.name]))


def load(argument: str) -> ConfigDict:
  """The config of `FILE.py` or `FILE.py:ARGUMENT`, as the flag has it.

  Raises:
    ConfigError: there is no such file, or it fails.
  """
  path, _, parameter = argument.partition(":")
  if not Path(path).is_file():
    raise ConfigError(f"config: {no_file(path)}")
  module = runpy.run_path(path)
  try:
    return module["get_config"](*filter(None, [parameter]))
  # Whatever a config file raises, and a file that has no such function.
  except Exception as error:
    _check_argument(error, argument)
    raise ConfigError(f"config: {argument}: {one_line(error)}") from error


def _check_argument(error: Exception, argument: str) -> None:
  """Raises ConfigError where a file was given an argument that it has no use for."""
  if "get_config() takes 0 positional arguments" in str(error):
    path, _, parameter = argument.partition(":")
    raise ConfigError(
      f"config: {path} takes nothing after a colon, got {parameter!r}"
    ) from error


class _WithSections(flags.ArgumentParser):
  """Adds to a config the sections of the overrides that were typed.

  `accept_new_attributes` adds leaves alone: in a section that is not there they
  end in a KeyError, which has the first name of the section and nothing else.
  """

  def __init__(self, parser: flags.ArgumentParser):
    self._parser = parser

  def parse(self, argument: str) -> Any:
    """The config of a file, with sections for the overrides."""
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
    if not isinstance(config, ConfigDict):  # The file cannot be read.
      return config
    for word in sys.argv[1:]:
      if typed := _OVERRIDE.match(word):
        _make_room(config, typed[1], has_value=bool(typed[2]))
    return config

  def flag_type(self) -> str:
    """As --help names it."""
    return self._parser.flag_type()


def _make_room(config: ConfigDict, leaf: str, has_value: bool) -> None:
  """Adds what is missing of the sections that a leaf is in.

  A word may take the place of a section, or of a list of them:
  `--config.model.decoder_attention=flash` and `=[gated_delta,flash]` choose by name,
  where `config_flags` takes a value for a leaf of its type alone. Where no word
  belongs is found when the config is validated.
  """
  if not all(name.isidentifier() for name in leaf.split(".")):
    raise ConfigError(
      f"--{_NAME}.{leaf}: expected names with dots between them, as "
      f"--{_NAME}.model.num_layers"
    )
  *names, last = leaf.split(".")
  section, path = config, _NAME
  for name in names:
    path = f"{path}.{name}"
    if name not in section:
      with section.unlocked():
        section[name] = ConfigDict()
    section = section[name]
    if not isinstance(section, ConfigDict):
      raise ConfigError(
        f"{_NAME}.{leaf}: unknown; {path} is one value and has no fields"
      )
  old = section.get(last)
  inside = old if isinstance(old, list | tuple) else [old]
  if has_value and any(isinstance(x, ConfigDict | dict) for x in inside):
    with section.unlocked(), section.ignore_type():
      section[last] = ""
