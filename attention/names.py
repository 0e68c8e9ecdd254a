"""Lookup of objects by name, and suggestions for unknown names.

A name is a key of a table or an import path, 'package.module:attribute'.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
import contextlib
import contextvars
import difflib
import importlib
import sys
import traceback
from typing import Any

_NO_IMPORTS = contextvars.ContextVar("no_imports", default=False)


@contextlib.contextmanager
def no_imports() -> Iterator[None]:
  """A context in which import paths raise, for names that are read from data."""
  token = _NO_IMPORTS.set(True)
  try:
    yield
  finally:
    _NO_IMPORTS.reset(token)


def resolve(name: str, known: Mapping[str, Any], kind: str) -> Any:
  """Looks a name up in `known`, or imports it.

  Args:
    name: a key of `known`, or 'package.module:attribute', which is imported.
    known: name -> object.
    kind: of the attribute, for messages: 'factory'.

  Raises:
    ValueError: the name is unknown, or imports are not allowed here. The message is
      one line.
  """
  if name in known:
    return known[name]
  path, colon, attribute = name.partition(":")
  if not colon:
    paths = [*known, f"package.module:{kind}"]
    raise ValueError(unknown_name(name, paths))
  if not all(part.isidentifier() for part in [*path.split("."), attribute]):
    raise ValueError(
      f"expected package.module:{kind}, with dots between folders and without "
      f".py, got {name!r}"
    )
  check_imports(name)
  if path.partition(".")[0] in sys.stdlib_module_names:
    raise ValueError(
      f"{path!r} is a module of Python itself, which has no {kind} of a config"
    )
  module = _module(path)
  if not hasattr(module, attribute):
    raise ValueError(
      f"module {path!r} has no {attribute!r}{suggestion(attribute, vars(module))}"
    )
  return getattr(module, attribute)


def _module(path: str) -> Any:
  try:
    return importlib.import_module(path)
  except Exception as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name
    # Not if the module exists and one that it imports is missing.
    if missing and f"{path}.".startswith(f"{missing}."):
      raise ValueError(
        f"no module named {missing!r}; start in the folder that contains it, or "
        "add that folder to PYTHONPATH"
      ) from None
    raise ValueError(
      f"importing {path} raised {failure_location(error)}"
    ) from None


def check_imports(name: str) -> None:
  """Raises ValueError for an import path where imports are not allowed."""
  if _NO_IMPORTS.get() and ":" in name:
    raise ValueError(
      f"{name!r} is an import path, and a folder of weights imports nothing; "
      "lab.load_run and generate.py --workdir open a folder as a run"
    )


def failure_location(error: Exception, *names: str) -> str:
  """The message of an exception of another project's code, and where it was raised.

  Args:
    error: the exception.
    *names: 'package.module:factory' of that code. The location is the innermost line
      of these modules, or of any module if the traceback has no line of theirs.
  """
  text = " ".join(f"{type(error).__name__}: {error}".split())
  lines = traceback.extract_tb(error.__traceback__)
  # The message of a syntax error includes its location.
  if not lines or isinstance(error, SyntaxError):
    return text
  modules = (sys.modules.get(name.partition(":")[0]) for name in names)
  files = [getattr(module, "__file__", None) for module in modules]
  own = [line for line in lines if line.filename in files]
  line = (own or lines)[-1]
  return f"{text} ({line.filename}:{line.lineno})"


def suggestion(got: str, known: Iterable[str]) -> str:
  """The text "; did you mean 'b'?", or '' if no name is similar.

  Case is ignored. Names that begin with `got` come before similar ones.
  """
  got, names = got.casefold(), {name.casefold(): name for name in known}
  longer = [x for x in names if x.startswith(got)] if len(got) > 2 else []
  for name in longer[:1] or difflib.get_close_matches(got, names, n=1):
    return f"; did you mean {names[name]!r}?"
  return ""


def unknown_name(got: object, known: Iterable[str]) -> str:
  """The text "unknown 'c'; did you mean 'b'?", or all names if none is similar."""
  known = list(known)
  hint = suggestion(str(got), known)
  if hint:
    return f"unknown {got!r}{hint}"
  return f"expected one of {', '.join(known)}, got {got!r}"


def unknown_option(option: str, name: str, known: Collection[str]) -> str:
  """The error message for an option that a function or factory does not have."""
  names = ", ".join(known) or "none"
  hint = suggestion(option, known)
  return f"{option}: {name} has no such option; it has {names}{hint}"
