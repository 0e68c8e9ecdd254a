"""Runs functions and definitions on the vectors of peers and compares results."""

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


def function_results(case: Case, given: Arrays) -> dict[str, Any]:
  """Returns the results of the function, or of `gates` and `apply`, by name."""
  function = getattr(attention, case.function)
  if case.function not in attention.ATTENTIONS:
    arguments = {**join_arrays(given), **case.fixed}
    out = function(**arguments, **resolve_options(case.options))
    return name_results(case, out)
  mechanism = function(**case.options)
  params, rest = split_params(given)
  variables = {"params": params}
  if "inputs" in rest:
    rest |= mechanism.gates(variables, rest.pop("inputs"))
  qkv = [rest.pop(name, None) for name in QKV]
  call = {"is_causal": True, **case.fixed, **case.call}
  out = mechanism.apply(variables, *qkv, **rest, **call)
  return name_results(case, out)


def definition_results(case: Case) -> dict[str, Any]:
  """Returns the results of the definition, by name."""
  if case.function not in attention.ATTENTIONS:
    function = getattr(definitions, case.function)
    options = {x: y for x, y in case.options.items() if x != "return_lse"}
    arguments = {**join_arrays(case.given), **case.fixed}
    out = function(**arguments, **resolve_options(options))
    return name_results(case, (out,) if "return_lse" in case.options else out)
  for module in (gated_linear, delta_rule):
    if hasattr(module, case.function):
      break
  else:
    module = importlib.import_module(f"attention.definitions.{case.function}")
  params, rest = split_params(case.given)
  function = getattr(module, case.function)
  options = {**case.fixed, **case.options, **case.call}
  return name_results(case, function(**rest, **params, **options))


def resolve_options(options: dict[str, Any]) -> dict[str, Any]:
  """Calls the functions that options name, such as `{"t5_bias": [...]}`."""

  def resolve(value):
    if isinstance(value, dict) and "rope_type" not in value:
      ((name, arguments),) = value.items()
      return getattr(attention, name)(*arguments)
    return tuple(value) if isinstance(value, list) else value

  return {name: resolve(value) for name, value in options.items()}


def join_arrays(given: Arrays) -> dict[str, Any]:
  """Joins `name/0`, `name/1`, … into one argument, a tuple of arrays."""
  rest = {name: x for name, x in given.items() if "/" not in name}
  for name, x in given.items():
    if "/" in name:
      name = name.partition("/")[0]
      rest[name] = (*rest.get(name, ()), x)
  return rest


def split_params(given: Arrays) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns the trainable variables of a mechanism, and the other arguments."""
  params = {
    name.removeprefix("params/"): x
    for name, x in given.items()
    if name.startswith("params/")
  }
  return params, {x: y for x, y in given.items() if not x.startswith("params/")}


def name_results(case: Case, results: Any) -> dict[str, Any]:
  """Gives results the names of the peer's; the first is `out`."""
  results = results if isinstance(results, tuple) else (results,)
  names = sorted(case.result, key=lambda name: name != "out")
  return dict(zip(names, results, strict=False))


def results_and_gradients(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns results, and gradients of Σ result · cotangent."""

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def run(given):
    results = function_results(case, given)
    total = sum(jnp.sum(x * case.cotangent[n]) for n, x in results.items())
    return total, results

  gradients, results = run({n: jnp.asarray(x) for n, x in case.given.items()})
  return results, gradients


def difference(result: Any, expected: np.ndarray) -> float:
  """Returns the largest difference relative to the largest expected value.

  It is infinite for NaN, and absolute if all expected values are 0.
  """
  assert np.shape(result) == expected.shape, (np.shape(result), expected.shape)
  error = np.abs(np.asarray(result, np.float64) - expected).max()
  return float(np.nan_to_num(error, nan=np.inf) / (np.abs(expected).max() or 1))


def differences(results: Arrays, expected: Arrays) -> dict[str, float]:
  """Returns the `difference` of every expected array."""
  assert results.keys() >= expected.keys(), (results.keys(), expected.keys())
  return {name: difference(results[name], x) for name, x in expected.items()}
