"""How entry points start: flags, and every fault in one line.

Imports nothing heavy, so that `--help` and a wrong flag are answered at once.
"""

from collections.abc import Callable
from pathlib import Path
import sys
from typing import Any, NoReturn

from absl import app, flags, logging

from training.config import ConfigError
from training.errors import RunError, one_line


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
      _fail(error, 2)
    except RunError as error:
      _fail(error, 1)

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


def _cause(error: BaseException) -> BaseException | str:
  """What is behind the wrappings of absl and config_flags."""
  if isinstance(error, KeyError) and error.args:
    # config_flags, for a section: "'modle'\nDid you mean …?"
    return f"config: no such leaf: {one_line(error)}"
  innermost = error
  while innermost.__cause__ or innermost.__context__:
    innermost = innermost.__cause__ or innermost.__context__
    if isinstance(innermost, ConfigError):
      return innermost
  if isinstance(error, OSError):
    text = str(innermost)
    return f"--config: {text.rsplit('[Errno 2] ')[-1]}"
  if "Error whilst parsing config file" in str(error):
    return f"--config: {type(innermost).__name__}: {one_line(innermost)}"
  return error


def _fail(error: BaseException | str, code: int) -> NoReturn:
  text = error if isinstance(error, str) else one_line(error)
  print(text, file=sys.stderr)
  sys.exit(code)
