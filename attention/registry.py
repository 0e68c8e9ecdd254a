"""The mechanisms by name, for configs, tests and tables.

The decorator of its factory enters a mechanism, and its record says everything else
about it. A mechanism of another project needs no entry: its name is its import path.
"""

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
import contextlib
import contextvars
import importlib
import inspect
import sys
import traceback
from types import MappingProxyType, UnionType
from typing import Any, Union, get_args, get_origin

from attention import plug
from attention.plug import Attention
from attention.suggest import near, one_of
from attention.unknown_names import unknown_mechanism

ATTENTIONS: Mapping[str, Callable[..., Attention]] = MappingProxyType(
  plug.MECHANISMS
)
"""name -> typed factory; `ATTENTIONS['performer'](num_features=64)`."""


_NO_IMPORTS = contextvars.ContextVar("no_imports", default=False)


@contextlib.contextmanager
def no_imports() -> Iterator[None]:
  """Within it an import path is refused: what is read is data and not a program."""
  token = _NO_IMPORTS.set(True)
  try:
    yield
  finally:
    _NO_IMPORTS.reset(token)


def named(name: str, known: Mapping[str, Any], kind: str) -> Any:
  """What a name stands for: an entry of `known`, or an import path.

  Args:
    name: a key of `known`, or 'package.module:attribute', which is imported.
    known: name -> what it stands for.
    kind: what the attribute is, for messages: 'factory'.

  Raises:
    ValueError: there is none, or nothing may be imported here; says on one line
      why, and what to do.
  """
  if name in known:
    return known[name]
  path, colon, attribute = name.partition(":")
  if not colon:
    paths = [*known, f"package.module:{kind}"]
    if known is ATTENTIONS:
      raise ValueError(unknown_mechanism(name, paths))
    raise ValueError(one_of(name, paths))
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
      f"module {path!r} has no {attribute!r}{near(attribute, vars(module))}"
    )
  return getattr(module, attribute)


def check_imports(name: str) -> None:
  """Raises ValueError for an import path where nothing may be imported."""
  if _NO_IMPORTS.get() and ":" in name:
    raise ValueError(
      f"{name!r} is an import path, and a folder of weights imports nothing; "
      "lab.load_run and generate.py --workdir open a folder as a run"
    )


def find(name: str) -> Callable[..., Attention]:
  """The factory of a mechanism, wherever it is.

  Args:
    name: key of `ATTENTIONS`, or 'package.module:factory', which is imported.

  Raises:
    ValueError: there is none, or it is not annotated `-> Attention`; says on one
      line why, and what to do.
  """
  factory = named(name, ATTENTIONS, "factory")
  if name in ATTENTIONS:
    return factory
  expected = "expected a function that returns an attention.Attention"
  try:
    if isinstance(factory, Attention):
      raise TypeError
    signature = inspect.signature(factory)
  except (TypeError, ValueError):  # No function, or one that is written in C.
    raise ValueError(
      f"{expected}, but {name} is of type {type(factory).__name__}"
    ) from None
  if next(iter(signature.parameters), None) in ("query", "q"):
    raise ValueError(
      f"{expected}, but {name} takes a query, as an attention function does; "
      "name the function that makes its record"
    )
  # A name may come from a file, so nothing else is called.
  returned = signature.return_annotation
  text = returned if isinstance(returned, str) else ""
  if returned is not Attention and text.rpartition(".")[2] != "Attention":
    raise ValueError(
      f"{name} is not annotated `-> Attention`, and nothing else is called by its "
      "import path; annotate the factory"
    )
  return factory


def build(name: str, options: Mapping[str, Any]) -> Attention:
  """Makes a mechanism and checks what was made.

  Args:
    name: as `find` takes it.
    options: hyperparameters; keyword arguments of the factory.

  Raises:
    ValueError: the message starts with the option that is unknown, missing or
      refused by the factory, and with 'name' for every other fault.
  """
  factory = _factory(name)
  parameters = inspect.signature(factory).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  for option in options:
    if option not in parameters and not takes_any:
      raise ValueError(plug.no_hyperparameter(option, name, parameters))
    # Our own factories say more of a value.
    allowed = name not in ATTENTIONS and _plain_types(parameters.get(option))
    if allowed and not isinstance(options[option], allowed):
      names = " or ".join(kind.__name__ for kind in allowed)
      names = names.replace("NoneType", "None")
      raise ValueError(f"{option}: expected {names}, got {options[option]!r}")
  for option in plug.required(factory):
    if option not in options:
      raise ValueError(f"{option}: {name} needs it, got nothing")
  try:
    record = factory(**options)
  except Exception as error:
    # A factory should raise ValueError; someone else's may raise any exception.
    option = str(error).partition(":")[0]
    if isinstance(error, ValueError) and option in parameters:
      raise
    raise ValueError(
      f"name: {name} raised {where_it_failed(error, name)}"
    ) from None
  if not isinstance(record, Attention):
    raise ValueError(
      f"name: {name} returned a {type(record).__name__}; expected an "
      "attention.Attention"
    )
  if not isinstance(record.supports, AbstractSet):
    raise ValueError(
      f"name: the `supports` of {name} is a {type(record.supports).__name__}; "
      "expected a frozenset of names"
    )
  for capability in record.supports:
    if capability not in plug.CAPABILITIES:
      raise ValueError(
        f"name: the `supports` of {name}: {one_of(capability, plug.CAPABILITIES)}"
      )
  if "decode" in record.supports and None in (record.init_cache, record.decode):
    raise ValueError(
      f"name: {name} supports 'decode', but its init_cache or decode is None"
    )
  return record


_PLAIN = {
  bool: (bool,),
  int: (int,),
  float: (float, int),
  str: (str,),
  type(None): (type(None),),
}


def _plain_types(parameter: inspect.Parameter | None) -> tuple[type, ...]:
  """What an option may be by its annotation; empty where that is not plain."""
  if parameter is None:
    return ()
  members = [parameter.annotation]
  if get_origin(parameter.annotation) in (UnionType, Union):
    members = get_args(parameter.annotation)
  if not all(x in _PLAIN for x in members):
    return ()
  return tuple(dict.fromkeys(kind for x in members for kind in _PLAIN[x]))


def example(name: str) -> Attention:
  """A record from which a mechanism's facts can be read, as `plug.example`.

  Raises:
    ValueError: as `build`.
  """
  return build(name, dict.fromkeys(plug.required(_factory(name)), 1))


def where_it_failed(error: Exception, *names: str) -> str:
  """An exception in other people's code, and the innermost line of that code.

  Args:
    error: what was raised.
    *names: 'package.module:factory' of the code; without any, or where no line of
      them took part, the line that raised it.
  """
  text = " ".join(f"{type(error).__name__}: {error}".split())
  lines = traceback.extract_tb(error.__traceback__)
  # A syntax error says itself where it is.
  if not lines or isinstance(error, SyntaxError):
    return text
  modules = (sys.modules.get(name.partition(":")[0]) for name in names)
  files = [getattr(module, "__file__", None) for module in modules]
  own = [line for line in lines if line.filename in files]
  line = (own or lines)[-1]
  if own and any(words in text for words in _UNCHECKED):
    text += "; checks of attention.arguments, called first, name the argument"
  return f"{text} ({line.filename}:{line.lineno})"


_UNCHECKED = ("'NoneType'", "incompatible shapes")
"""What Python and JAX say of an argument that was computed with and not checked."""


def _factory(name: str) -> Callable[..., Attention]:
  """`find`, whose fault is one of the leaf 'name' of a config."""
  try:
    return find(name)
  except ValueError as error:
    raise ValueError(f"name: {error}") from None


def _module(path: str) -> Any:
  try:
    return importlib.import_module(path)
  except Exception as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name
    # Not where the module is there and one that it imports is not.
    if missing and f"{path}.".startswith(f"{missing}."):
      raise ValueError(
        f"no module {missing!r} is found; start from the folder that holds it, "
        "or add that folder to PYTHONPATH"
      ) from None
    raise ValueError(
      f"importing {path} raised {where_it_failed(error)}"
    ) from None
