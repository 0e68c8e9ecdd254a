"""How entry points start: flags, help, and every fault in one line."""

from collections.abc import Callable, Sequence
import errno
from functools import partial
import gc
import os
from pathlib import Path
import re
import signal
import sys
import textwrap
import threading
from typing import Any, NoReturn

from absl import app, flags, logging

from settings.errors import ConfigError, RunError, one_line
from settings.suggest import no_file
from training.devices import process

# How Python says that a text is not a value of a type.
_EXPECTED = {
  "invalid literal for int()": "a valid integer",
  "could not convert string to float": "a valid number",
  "Non-boolean argument": "a valid boolean",
  "as a ConfigDict": "leaves of its own, each with its name",
}

_HELP = ("--help", "-help", "--helpshort", "-?")

# Importing libraries and tracing a model make millions of objects that stay.
# With Python's 700 it looks through them 800 times during a start, 0.6 s.
_COLLECT_EVERY = 50_000


def run(
  main: Callable[..., int | None],
  commands: Sequence[str] = (),
  describe: Callable[[Any], str] | None = None,
) -> NoReturn:
  """Parses flags and calls `main`.

  Exits with 0, or with one line on standard error: with 2 for what the user
  asked for, before anything is written, and with 1 for what stopped a run.
  `--help` shows the docstring of the program's file, examples included, and
  the flags of that file; behind a config, also its leaves.

  Args:
    main: the program; called with nothing, or where there are `commands` with
      the one that was typed, or None.
    commands: words that may be typed before the flags.
    describe: the mapping of a config -> a text of its leaves, for `--help`.
  """

  def guarded(arguments):
    # Libraries log a lot that does not concern a user.
    logging.set_verbosity(logging.FATAL)
    threading.excepthook = sys.unraisablehook = lambda told: _aside(
      told.exc_type, told.exc_value, told.exc_traceback
    )
    sys.excepthook = _aside
    try:
      code = main(*_command(arguments[1:], commands))
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
    except Exception as error:
      if line := _exhausted(error):
        print(line, file=sys.stderr, flush=True)
        # Threads of libraries would each tell what they cannot write.
        os._exit(1)
      if line := _missing_device():
        fail(line, 2)
      raise

  gc.set_threshold(_COLLECT_EVERY)
  process.replace_signs()
  process.keep_fonts()
  app.run(guarded, flags_parser=partial(_parse, describe))
  raise AssertionError  # app.run exits.


def _command(words: Sequence[str], commands: Sequence[str]) -> list[str | None]:
  """What `main` is called with: the command among words that are not flags."""
  if not words:
    return [None] if commands else []
  if len(words) == 1 and words[0] in commands:
    return [words[0]]
  expected = f"{', '.join(commands)} or " if commands else ""
  raise ConfigError(
    f"{words[-1]}: expected {expected}flags only (--name=value)"
  )


def _aside(kind: Any, error: Any, trace: Any) -> None:
  """Tells what a thread or callback raised, but want of room, which ends the run.

  After that, Orbax's library finds its own loop of events closed.
  """
  if not _exhausted(error) and "Event loop is closed" not in str(error):
    sys.__excepthook__(kind, error, trace)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


def _exhausted(error: BaseException | None) -> str:
  """What there is no room for, on disk or in memory; empty for other errors."""
  again = "then the same command goes on from the last checkpoint"
  while error is not None:
    text = one_line(error)
    # Orbax's library has the number of an error of the system in its message.
    number = re.search(r"os_error_code='(\d+)'", text)
    code = int(number[1]) if number else getattr(error, "errno", 0) or 0
    if code in (*_NO_ROOM, *_NOT_ALLOWED):
      remedy = "make room" if code in _NO_ROOM else "allow this user to use it"
      where = getattr(error, "filename", None)
      place = f" ({where})" if where else ""
      return f"{os.strerror(code)}{place}; {remedy}, {again}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
      return (
        f"out of memory ({text[:200]}); lower config.batch_size or what else is "
        f"large, or double config.optimizer.accumulate_steps, {again}"
      )
    error = error.__cause__ or error.__context__
  return ""


def _missing_device() -> str:
  """What is wrong with JAX_PLATFORMS; empty where JAX has such a device.

  Asked once something has failed: JAX starts its devices where they are first
  used, and says only in a traceback that it has none.
  """
  platforms, jax = os.environ.get("JAX_PLATFORMS"), sys.modules.get("jax")
  if not platforms or jax is None:
    return ""
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    why = f" ({one_line(error)})" if str(error) else ""
    return (
      f"JAX_PLATFORMS: expected a device that this machine has, got "
      f"{platforms!r}{why}; without the variable JAX takes what there is"
    )
  return ""


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
    raise ConfigError(f"--config: {no_file(path)}")
  return file, flag.value


def _parse(
  describe: Callable[[Any], str] | None, arguments: list[str]
) -> list[str]:
  """Parses flags; the config file is run in here."""
  others = [x for x in arguments if x not in _HELP]
  is_help = len(others) < len(arguments)
  has_config = any(x.lstrip("-").startswith("config") for x in others[1:])
  if is_help:
    print(_help(arguments[0]))
    # Not where the config file has to be run, which takes a second.
    if describe is None or not has_config:
      sys.exit(0)
  # A config may name a module of the folder that the command was typed in,
  # where a script sees the folder that it lies in.
  sys.path.append(os.getcwd())
  try:
    words = flags.FLAGS(others)
    if is_help and describe is not None:
      print(describe(flags.FLAGS["config"].value))
      sys.exit(0)
    return words
  except SystemExit:  # --helpfull, which absl ends with 1.
    sys.exit(0)
  # Whatever a config file or the libraries below raise.
  except Exception as error:
    line = _cause(error)
    is_unknown = isinstance(error, flags.UnrecognizedFlagError)
    if is_unknown and "config" in flags.FLAGS and "Did you mean" not in line:
      line += f"; a leaf of the config is --config.{error.flagname}=…"
    fail(line, 2)


def _help(program: str) -> str:
  """The program's docstring and its own flags."""
  lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:"]
  # Absl files the flags of the main module under its path; the library of
  # configs defines this one.
  own = flags.FLAGS.get_key_flags_for_module(program)
  config = [flags.FLAGS["config"]] if "config" in flags.FLAGS else []
  for flag in config + own:
    text = flag.help or ""
    if flag.default is not None:
      text += " (default " + str(flag.default_as_str).strip("'") + ")"
    wrapped = textwrap.wrap(text, 74, break_on_hyphens=False)
    lines += [f"  --{flag.name}", *(f"      {line}" for line in wrapped)]
  return "\n".join([*lines, "", "--helpfull shows the libraries' flags too."])


def _cause(error: BaseException) -> str:
  """What is behind the wrappings of absl and config_flags."""
  innermost = error
  while inner := innermost.__cause__ or (
    None if innermost.__suppress_context__ else innermost.__context__
  ):
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
