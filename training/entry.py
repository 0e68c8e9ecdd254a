"""How entry points start: flags, and every fault in one line.

Imports nothing heavy, so that `--help` and a wrong flag are answered at once.
"""

from collections.abc import Callable
from pathlib import Path
import re
import sys
from typing import Any, NoReturn

from absl import app, flags, logging

from training.config import ConfigError
from training.errors import RunError, one_line

# How Python says that text is no value of a type.
_EXPECTED = {
  "invalid literal for int()": "int",
  "could not convert string to float": "a number",
  "Non-boolean argument": "true or false",
}


def run(main: Callable[[], int | None]) -> NoReturn:
  """Parses flags and calls `main`.

  Exits with 0, or with one line on standard error: with 2 for what the user
  asked for, before anything is written, and with 1 for what stopped a run.

  Args:
    main: the program.
  """

  def guarded(arguments):
    # Libraries log a lot that is no concern of a user.
    logging.set_verbosity(logging.ERROR)
    try:
      if len(arguments) > 1:
        raise ConfigError(f"{arguments[1]}: expected flags only (--name=value)")
      return main()
    except ConfigError as error:
      _fail(one_line(error), 2)
    except RunError as error:
      _fail(one_line(error), 1)

  app.run(guarded, flags_parser=_parse)
  raise AssertionError  # app.run exits.


def load_config(value: Any, file: str | None) -> Any:
  """The mapping behind a config flag.

  Args:
    value: of the flag.
    file: what was typed: `FILE.py` or `FILE.py:ARGUMENT`.

  Raises:
    ConfigError: there is no such file.
  """
  if value is None:
    raise ConfigError("--config: missing; for example --config=configs/copy.py")
  path = Path(file.partition(":")[0])
  if not path.is_file():
    raise ConfigError(f"--config: no file {str(path)!r}")
  return value


def _parse(arguments: list[str]) -> list[str]:
  """Parses flags; the config file is run in here."""
  try:
    return flags.FLAGS(arguments)
  except SystemExit:  # --help, which absl ends with 1.
    sys.exit(0)
  # Whatever a config file or the libraries below raise.
  except Exception as error:
    _fail(_cause(error), 2)


def _cause(error: BaseException) -> str:
  """What is behind the wrappings of absl and config_flags."""
  innermost = error
  while innermost.__cause__ or innermost.__context__:
    innermost = innermost.__cause__ or innermost.__context__
  if isinstance(error, KeyError):
    # A section that is not there: "'modle'\nDid you mean "model" instead …?"
    near = re.search('Did you mean "(.*?)"', one_line(error))
    hint = f"; did you mean {near[1]!r}?" if near else ""
    return f"config.{one_line(innermost)}: unknown{hint}"
  if isinstance(error, flags.IllegalFlagValueError):
    flag = re.match(r"flag --(\S+?)=(.*?): ", str(error))
    for sign, expected in _EXPECTED.items():
      if flag and sign in str(innermost):
        return f"{flag[1]}: expected {expected}, got {flag[2]!r}"
  if isinstance(error, OSError):
    return f"--config: {one_line(innermost).rsplit('[Errno 2] ')[-1]}"
  if "Error whilst parsing config file" in str(error):
    return f"--config: {one_line(innermost)}"
  return one_line(error)


def _fail(line: str, code: int) -> NoReturn:
  print(line, file=sys.stderr)
  sys.exit(code)
