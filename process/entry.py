"""How entry points start: flags, and every fault in one line.

Imports nothing heavy, so that `--help` is answered at once. A faulty flag takes
about a second where a config file is typed as well: the file is run while the
flags are parsed, and every config imports JAX.
"""

from collections.abc import Callable, Sequence
import os
from pathlib import Path
import re
import signal
import sys
from typing import Any, NoReturn

from absl import app, flags, logging

from process.errors import ConfigError, RunError, one_line

# How Python says that text is no value of a type.
_EXPECTED = {
  "invalid literal for int()": "int",
  "could not convert string to float": "a number",
  "Non-boolean argument": "true or false",
  "as a ConfigDict": "leaves of its own, each with its name",
}


def run(
  main: Callable[..., int | None], commands: Sequence[str] = ()
) -> NoReturn:
  """Parses flags and calls `main`.

  Exits with 0, or with one line on standard error: with 2 for what the user
  asked for, before anything is written, and with 1 for what stopped a run.

  Args:
    main: the program; called with nothing, or where there are `commands` with
      the one that was typed, or None.
    commands: words that may be typed before the flags.
  """

  def guarded(arguments):
    # Libraries log a lot that is no concern of a user.
    logging.set_verbosity(logging.ERROR)
    try:
      code = _call(main, arguments[1:], commands)
      sys.stdout.flush()
      return code
    except BrokenPipeError:
      # Who reads the output, such as `head`, has had enough of it.
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      sys.exit(128 + signal.SIGPIPE)
    except ConfigError as error:
      fail(one_line(error), 2)
    except RunError as error:
      fail(one_line(error), 1)
    except KeyboardInterrupt:
      sys.exit(128 + signal.SIGINT)

  app.run(guarded, flags_parser=_parse)
  raise AssertionError  # app.run exits.


def _call(
  main: Callable[..., int | None], words: Sequence[str], commands: Sequence[str]
) -> int | None:
  """Calls `main` with the command among the words that are no flags."""
  if not words:
    return main(None) if commands else main()
  if len(words) == 1 and words[0] in commands:
    return main(words[0])
  expected = f"{', '.join(commands)} or " if commands else ""
  raise ConfigError(
    f"{words[-1]}: expected {expected}flags only (--name=value)"
  )


def load_config(
  flag: flags.FlagHolder, example: str = "configs/copy.py"
) -> tuple[str, Any]:
  """What was typed for a config flag, and the mapping behind it.

  Args:
    flag: of `config_flag.define`, parsed.
    example: a file to name where none was typed.

  Returns:
    `FILE.py` or `FILE.py:ARGUMENT`, and the mapping with all overrides.

  Raises:
    ConfigError: the flag or the file is missing.
  """
  if flag.value is None:
    raise ConfigError(f"--config: missing; for example --config={example}")
  file: str = getattr(flags.FLAGS[flag.name], "config_filename")  # noqa: B009
  # config_flags leaves a missing file to be found when the value is used.
  path = file.partition(":")[0]
  if not Path(path).is_file():
    raise ConfigError(f"--config: no such file: {path!r}")
  return file, flag.value


def _parse(arguments: list[str]) -> list[str]:
  """Parses flags; the config file is run in here."""
  try:
    return flags.FLAGS(arguments)
  except SystemExit:  # --help, which absl ends with 1.
    sys.exit(0)
  # Whatever a config file or the libraries below raise.
  except Exception as error:
    fail(_cause(error), 2)


def _cause(error: BaseException) -> str:
  """What is behind the wrappings of absl and config_flags."""
  innermost = error
  while inner := innermost.__cause__ or innermost.__context__:
    innermost = inner
  if isinstance(innermost, ConfigError):
    return one_line(innermost)
  if isinstance(error, flags.IllegalFlagValueError):
    flag = re.match(r"flag --(\S+?)=(.*?): ", str(error))
    for sign, expected in _EXPECTED.items():
      if flag and sign in str(error):
        return f"{flag[1]}: expected {expected}, got {flag[2]!r}"
  if isinstance(error, OSError):
    text = one_line(innermost).rpartition("[Errno 2] ")[2]
    return f"--config: {text[:1].lower()}{text[1:]}"
  if "Error whilst parsing config file" in str(error):
    return f"--config: {one_line(innermost)}"
  if isinstance(error, flags.Error):
    return one_line(error)
  return f"--config: {one_line(error)}"  # The file is run in here.


def fail(line: str, code: int) -> NoReturn:
  """Ends the program with one line on standard error."""
  print(line, file=sys.stderr)
  sys.exit(code)
