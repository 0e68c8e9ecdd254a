"""What a message says of a name or a call that this library does not have."""

from collections.abc import Collection
import sys

from attention import plug
from attention.suggest import any_of, meant


def has_arrays(option: str, name: str) -> str:
  """Why a factory cannot be called with an array, and what to call."""
  instead = [
    f"{function}(query, key, value, …)" for function in function_of(name)
  ]
  instead.append(f"{name}(…).apply(variables, query, key, value, …)")
  return (
    f"{option}: {name} makes a mechanism from hyperparameters, got an array; "
    f"call {' or '.join(instead)}"
  )


def function_of(name: str) -> list[str]:
  """The attention function in the file of a factory, in a list; often its own."""
  factory = plug.MECHANISMS.get(name)
  own = vars(sys.modules[factory.__module__]) if factory else {}
  here = [
    function
    for function in plug.FUNCTIONS
    if function in own and own[function].__module__ == factory.__module__
  ]
  return [n for n in here if n == f"{name}_attention"] or here[:1]


def no_attribute(name: str, known: Collection[str]) -> str:
  """What to do about a name that the library does not have."""
  mechanism = name.removesuffix("_attention")
  if mechanism == name:
    return any_of(meant(name, known))
  if mechanism not in plug.MECHANISMS:
    shown = {n.removesuffix("_attention"): n for n in plug.FUNCTIONS}
    shown = {**{n: n for n in plug.MECHANISMS}, **shown}
    return any_of(shown[n] for n in meant(mechanism, shown))
  functions = "".join(f"{f}, or " for f in function_of(mechanism))
  return (
    f"; {mechanism} has no function of its own: use {functions}its record "
    f"{mechanism}(…), which makes the gates"
  )


def unknown_mechanism(name: str, known: Collection[str]) -> str:
  """What to do about the name of a mechanism that is not known."""
  texts = {}
  for n, factory in plug.MECHANISMS.items():
    own = vars(sys.modules[factory.__module__])
    function = own.get(f"{n}_attention")
    texts[n] = f"{factory.__doc__} {getattr(function, '__doc__', '')}"
  hint = any_of(meant(name, plug.MECHANISMS, texts))
  if hint:
    return f"unknown {name!r}{hint}"
  return f"expected one of {', '.join(known)}, got {name!r}"
