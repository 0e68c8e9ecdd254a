"""Start of the entry points: flags, help, and errors in one line."""

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
from settings.suggest import missing_file
from training.devices import process

# Python's messages for a text that is not a value of a type.
_EXPECTED = {
  "invalid literal for int()": "a valid integer",
  "could not convert string to float": "a valid number",
  "Non-boolean argument": "a valid boolean",
  "as a ConfigDict": "fields of the section, each with its name",
}

_HELP = ("--help", "-help", "--helpshort", "-?")

# Importing libraries and tracing a model create millions of objects that stay
# alive. With Python's threshold of 700 the garbage collector scans them 800 times
# during a start, which takes 0.6 s.
_COLLECT_EVERY = 50_000


def run(
  main: Callable[..., int | None],
  commands: Sequence[str] = (),
  describe: Callable[[Any], str] | None = None,
) -> NoReturn:
  """Parses flags and calls `main`.

  Exits with 0, or prints one line on standard error: it exits with 2 for a user's
  mistake, before anything is written, and with 1 if a run was stopped. `--help`
  shows the docstring of the program's file, with its examples, and the flags of
  that file; after `--config`, also the fields of the config.

  Args:
    main: the program; called without arguments, or, if there are `commands`, with
      the command from the command line, or None.
    commands: words that may precede the flags.
    describe: makes the text of a config's fields from its mapping, for `--help`.
  """

  def guarded(arguments):
    # Libraries log much that does not concern the user.
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
      # The reader of the output, such as `head`, has closed the pipe.
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
        # Otherwise every library thread would report its own failed write.
        os._exit(1)
      if line := _missing_device():
        fail(line, 2)
      raise

  gc.set_threshold(_COLLECT_EVERY)
  process.replace_unencodable()
  process.cache_fonts()
  app.run(guarded, flags_parser=partial(_parse, describe))
  raise AssertionError  # app.run exits.


def _command(words: Sequence[str], commands: Sequence[str]) -> list[str | None]:
  """The arguments of `main`: the command among the words that are not flags."""
  if not words:
    return [None] if commands else []
  if len(words) == 1 and words[0] in commands:
    return [words[0]]
  expected = f"{', '.join(commands)} or " if commands else ""
  raise ConfigError(
    f"{words[-1]}: expected {expected}flags only (--name=value)"
  )


def _aside(kind: Any, error: Any, trace: Any) -> None:
  """Reports an exception of a thread or callback.

  Skips a lack of disk space or memory, which ends the run by itself, and the closed
  event loop that Orbax's library then finds.
  """
  if not _exhausted(error) and "Event loop is closed" not in str(error):
    sys.__excepthook__(kind, error, trace)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


def _exhausted(error: BaseException | None) -> str:
  """Explains a full disk, missing permission or lack of memory; else empty."""
  again = "then the same command continues from the last checkpoint"
  while error is not None:
    text = one_line(error)
    # Orbax's library puts the errno of a system error into its message.
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
  """Explains a wrong JAX_PLATFORMS; empty if JAX has such a device.

  Called only after a failure: JAX initialises its devices on first use, and reports
  only in a traceback that it has none.
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
      f"{platforms!r}{why}; without the variable JAX chooses an available device"
    )
  return ""


def load_config(
  flag: flags.FlagHolder, example: str = "configs/copy.py"
) -> tuple[str, Any]:
  """The value of a config flag, and the mapping that it stands for.

  Args:
    flag: result of `config_flag.define`, parsed.
    example: the file that the message names if the flag is missing.

  Returns:
    `FILE.py` or `FILE.py:ARGUMENT`, and the mapping with all overrides.

  Raises:
    ConfigError: the flag or the file is missing.
  """
  if flag.value is None:
    raise ConfigError(f"--config: missing; for example --config={example}")
  file: str = getattr(flags.FLAGS[flag.name], "config_filename")  # noqa: B009
  # config_flags reports a missing file only when the value is used.
  path = file.partition(":")[0]
  if not Path(path).is_file():
    raise ConfigError(f"--config: {missing_file(path)}")
  return file, flag.value


def _parse(
  describe: Callable[[Any], str] | None, arguments: list[str]
) -> list[str]:
  """Parses flags, which runs the config file."""
  others = [x for x in arguments if x not in _HELP]
  is_help = len(others) < len(arguments)
  has_config = any(x.lstrip("-").startswith("config") for x in others[1:])
  if is_help:
    print(_help(arguments[0]))
    # The config's fields follow only if there is a config file, which takes a
    # second to run.
    if describe is None or not has_config:
      sys.exit(0)
  # A config may name a module of the current folder; Python puts only the folder
  # of the script on its path.
  sys.path.append(os.getcwd())
  try:
    words = flags.FLAGS(others)
    if is_help and describe is not None:
      print(describe(flags.FLAGS["config"].value))
      sys.exit(0)
    return words
  except SystemExit:  # --helpfull, for which absl exits with 1.
    sys.exit(0)
  # A config file and the libraries that read it may raise anything.
  except Exception as error:
    line = _cause(error)
    is_unknown = isinstance(error, flags.UnrecognizedFlagError)
    if is_unknown and "config" in flags.FLAGS and "Did you mean" not in line:
      line += f"; a field of the config is --config.{error.flagname}=…"
    fail(line, 2)


def _help(program: str) -> str:
  """The program's docstring and its own flags."""
  lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:"]
  # Absl stores the flags of the main module under its path; ml_collections
  # defines --config, so it is not among them.
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
  """The message of the error that absl and config_flags wrapped."""
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
  return f"--config: {one_line(error)}"  # Parsing runs the file.


def fail(line: str, code: int) -> NoReturn:
  """Ends the program with one line on standard error."""
  print(line, file=sys.stderr)
  sys.exit(code)
