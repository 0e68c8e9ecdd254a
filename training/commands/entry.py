"""Startup of the entry points: flags, help, and one-line errors."""

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

# Parts of Python's error messages, and what our messages expect instead.
_EXPECTED = {
  "invalid literal for int()": "a valid integer",
  "could not convert string to float": "a valid number",
  "Non-boolean argument": "a valid boolean",
  "as a ConfigDict": "fields of the section, each with its name",
}

_HELP = ("--help", "-help", "--helpshort", "-?")

# Importing libraries and tracing a model create millions of objects that stay alive.
# With Python's threshold of 700, the garbage collector scans them 800 times during
# startup, which takes 0.6 s.
_COLLECT_EVERY = 50_000


def run(
  main: Callable[..., int | None],
  commands: Sequence[str] = (),
  describe: Callable[[Any], str] | None = None,
) -> NoReturn:
  """Parses flags and calls `main`.

  The exit code is 0 on success. A user's mistake prints one line on standard error and
  exits with 2, before anything is written; a stopped run prints one line and exits with
  1. `--help` shows the docstring of the program, with its examples, and its flags; with
  `--config`, it also shows the fields of the config.

  Args:
    main: the program; called without arguments, or, if there are `commands`, with
      the command from the command line, or None.
    commands: words that may precede the flags.
    describe: formats the fields of a config, given its mapping, for `--help`.
  """

  def guarded(arguments):
    # Libraries log much that does not concern the user.
    logging.set_verbosity(logging.FATAL)
    threading.excepthook = sys.unraisablehook = lambda failure: _report(
      failure.exc_type, failure.exc_value, failure.exc_traceback
    )
    sys.excepthook = _report
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
      if line := _resource_error(error):
        print(line, file=sys.stderr, flush=True)
        # Exit here, so that threads of libraries do not report their failed writes.
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
  """Returns the arguments of `main`, from the words that are not flags."""
  if not words:
    return [None] if commands else []
  if len(words) == 1 and words[0] in commands:
    return [words[0]]
  expected = f"{', '.join(commands)} or " if commands else ""
  raise ConfigError(
    f"{words[-1]}: expected {expected}flags only (--name=value)"
  )


def _report(kind: Any, error: Any, trace: Any) -> None:
  """Reports an exception of a thread or a callback.

  It skips a lack of disk space or memory, which ends the run, and the error of Orbax's
  library that its event loop is then closed.
  """
  if not _resource_error(error) and "Event loop is closed" not in str(error):
    sys.__excepthook__(kind, error, trace)


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


def _resource_error(error: BaseException | None) -> str:
  """Explains a full disk, a missing permission or a lack of memory; otherwise empty."""
  advice = "then the same command continues from the last checkpoint"
  while error is not None:
    text = one_line(error)
    # Orbax's library puts the errno of a system error into its message.
    number = re.search(r"os_error_code='(\d+)'", text)
    code = int(number[1]) if number else getattr(error, "errno", 0) or 0
    if code in (*_NO_ROOM, *_NOT_ALLOWED):
      remedy = "make room" if code in _NO_ROOM else "allow this user to use it"
      filename = getattr(error, "filename", None)
      path = f" ({filename})" if filename else ""
      return f"{os.strerror(code)}{path}; {remedy}, {advice}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text:
      return (
        f"out of memory ({text[:200]}); lower config.batch_size or another large "
        f"size, or double config.optimizer.accumulate_steps, {advice}"
      )
    error = error.__cause__ or error.__context__
  return ""


def _missing_device() -> str:
  """Explains a wrong JAX_PLATFORMS; empty if JAX has such a device.

  It is called only after a failure: JAX initialises its devices on first use, and
  reports missing devices only in a traceback.
  """
  platforms, jax = os.environ.get("JAX_PLATFORMS"), sys.modules.get("jax")
  if not platforms or jax is None:
    return ""
  try:
    jax.devices()
  except (AssertionError, RuntimeError) as error:
    reason = f" ({one_line(error)})" if str(error) else ""
    return (
      f"JAX_PLATFORMS: expected a device that this machine has, got "
      f"{platforms!r}{reason}; without the variable JAX chooses an available device"
    )
  return ""


def load_config(
  flag: flags.FlagHolder, example: str = "configs/copy.py"
) -> tuple[str, Any]:
  """Returns the value of a config flag, and the config that it specifies.

  Args:
    flag: the parsed result of `config_flag.define`.
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
    # The config's fields follow only if there is a config file, as running it takes a
    # second.
    if describe is None or not has_config:
      sys.exit(0)
  # A config may name a module in the current folder, but Python's path has only the
  # folder of the script.
  sys.path.append(os.getcwd())
  try:
    words = flags.FLAGS(others)
    if is_help and describe is not None:
      print(describe(flags.FLAGS["config"].value))
      sys.exit(0)
    return words
  except SystemExit:  # --helpfull, for which absl exits with 1.
    sys.exit(0)
  # A config file and the libraries that read it may raise any exception.
  except Exception as error:
    line = _cause(error)
    is_unknown = isinstance(error, flags.UnrecognizedFlagError)
    if is_unknown and "config" in flags.FLAGS and "Did you mean" not in line:
      line += f"; a field of the config is --config.{error.flagname}=…"
    fail(line, 2)


def _help(program: str) -> str:
  """Returns the program's docstring and its own flags."""
  lines = [(sys.modules["__main__"].__doc__ or "").strip(), "", "Flags:"]
  # Absl stores the flags of the main module under its path. --config is not among them,
  # because ml_collections defines it.
  program_flags = flags.FLAGS.get_key_flags_for_module(program)
  config = [flags.FLAGS["config"]] if "config" in flags.FLAGS else []
  for flag in config + program_flags:
    text = flag.help or ""
    if flag.default is not None:
      text += " (default " + str(flag.default_as_str).strip("'") + ")"
    wrapped = textwrap.wrap(text, 74, break_on_hyphens=False)
    lines += [f"  --{flag.name}", *(f"      {line}" for line in wrapped)]
  return "\n".join([*lines, "", "--helpfull shows the libraries' flags too."])


def _cause(error: BaseException) -> str:
  """Returns the message of the error that absl and config_flags wrapped."""
  innermost = error
  while inner := innermost.__cause__ or (
    None if innermost.__suppress_context__ else innermost.__context__
  ):
    innermost = inner
  if isinstance(innermost, ConfigError):
    return one_line(innermost)
  if isinstance(error, flags.IllegalFlagValueError):
    flag = re.match(r"flag --(\S+?)=(.*?): ", str(error))
    for phrase, expected in _EXPECTED.items():
      if flag and phrase in str(error):
        meant = "; did you mean None?" * (flag[2].lower() in ("none", "null"))
        return f"{flag[1]}: expected {expected}, got {flag[2]!r}{meant}"
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
