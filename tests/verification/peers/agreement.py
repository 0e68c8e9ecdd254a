"""What our functions and definitions give for the vectors of peers, and how far off."""

import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import attention
from attention import definitions
from attention.definitions import delta_rule, gated_linear
from tests.verification.peers.vectors import Arrays, Case

QKV = ("query", "key", "value")


def ours(case: Case, given: Arrays) -> dict[str, Any]:
  """Results of the function, or of a mechanism's `gates` and `apply`, by name."""
  function = getattr(attention, case.function)
  if case.function not in attention.ATTENTIONS:
    found = function(**joined(given), **case.fixed, **made(case.options))
    return named(case, found)
  mechanism = function(**case.options)
  params, rest = split(given)
  variables = {"params": params}
  if "inputs" in rest:
    gates = mechanism.gates(variables, rest.pop("inputs"))
    rest |= gates
  qkv = [rest.pop(name, None) for name in QKV]
  call = {"is_causal": True, **case.fixed, **case.call}
  out = mechanism.apply(variables, *qkv, **rest, **call)
  return named(case, out)


def defined(case: Case) -> dict[str, Any]:
  """Results of the definition."""
  if case.function not in attention.ATTENTIONS:
    function = getattr(definitions, case.function)
    options = {x: y for x, y in case.options.items() if x != "return_lse"}
    found = function(**joined(case.given), **case.fixed, **made(options))
    if "return_lse" in case.options:
      found = (found,)
    return named(case, found)
  for module in (gated_linear, delta_rule):
    if hasattr(module, case.function):
      break
  else:
    module = importlib.import_module(f"attention.definitions.{case.function}")
  params, rest = split(case.given)
  function = getattr(module, case.function)
  options = {**case.fixed, **case.options, **case.call}
  return named(case, function(**rest, **params, **options))


def made(options: dict[str, Any]) -> dict[str, Any]:
  """Options, those that name a function replaced by what it returns."""

  def of(value):
    if isinstance(value, dict) and "rope_type" not in value:
      ((name, arguments),) = value.items()
      return getattr(attention, name)(*arguments)
    return tuple(value) if isinstance(value, list) else value

  return {name: of(value) for name, value in options.items()}


def joined(given: Arrays) -> dict[str, Any]:
  """Arguments; `name/0`, `name/1`, … are one of several arrays."""
  rest = {name: x for name, x in given.items() if "/" not in name}
  for name, x in given.items():
    if "/" in name:
      name = name.partition("/")[0]
      rest[name] = (*rest.get(name, ()), x)
  return rest


def split(given: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
  """Variables of a mechanism, and the other arguments."""
  params = {
    name.removeprefix("params/"): x
    for name, x in given.items()
    if name.startswith("params/")
  }
  return params, {x: y for x, y in given.items() if not x.startswith("params/")}


def named(case: Case, found: Any) -> dict[str, Any]:
  """Results by the names under which the peer's are kept; the first is `out`."""
  found = found if isinstance(found, tuple) else (found,)
  names = sorted(case.result, key=lambda name: name != "out")
  return dict(zip(names, found, strict=False))


def with_gradients(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
  """Results, and gradients of Σ result · cotangent."""

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(given):
    results = ours(case, given)
    total = sum(jnp.sum(x * case.cotangent[n]) for n, x in results.items())
    return total, results

  gradients, results = run({n: jnp.asarray(x) for n, x in case.given.items()})
  return results, gradients


def difference(found: Any, expected: np.ndarray) -> float:
  """The largest, as a share of the largest value; NaN is infinitely far."""
  assert np.shape(found) == expected.shape, (np.shape(found), expected.shape)
  away = np.abs(np.asarray(found, np.float64) - expected).max()
  # Where all is 0, nothing but 0 is right.
  return float(np.nan_to_num(away, nan=np.inf) / (np.abs(expected).max() or 1))


def differences(found: Arrays, expected: Arrays) -> dict[str, float]:
  """`difference` of each array; nothing is left out."""
  assert found.keys() >= expected.keys(), (found.keys(), expected.keys())
  return {name: difference(found[name], x) for name, x in expected.items()}
