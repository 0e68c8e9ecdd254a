"""Counts the floating-point operations of a JAX function, including loop iterations.

XLA's `cost_analysis()` counts the body of a loop once, and most mechanisms are loops
over blocks. Therefore, this module walks the jaxpr, also for functions without loops,
so that all counts are comparable.

  dot_general, convolution     2 for each output and term of its sum
  elementwise                  1 for each output, also exp and similar functions
  x^n                          its multiplications by repeated squaring
  reduction; scatter-add       1 for each input; for each update
  sort, top_k                  n log₂ n for each row of n
  qr                           4·(m·n·min − min³/3)
  integers, moves, selections  0

A scan counts length × body, a while loop iterations × body, a `shard_map` devices ×
body, and a `cond` the branch taken, or the most expensive one if that is unknown. The
numbers of iterations and the branches are computed from small integers that depend only
on constants and on the counters of enclosing loops. For a loop whose end depends on the
data, only the iterations that are certain are counted, usually none; `uncounted` lists
such loops, and operations without a rule.
"""

from collections.abc import Callable, Sequence
import math
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal
import jax.numpy as jnp
import numpy as np


def _names(text: str) -> frozenset[str]:
  return frozenset(text.split())


_CALLS = _names("""
  checkpoint closed_call core_call custom_jvp_call custom_vjp_call
  custom_vjp_call_jaxpr eval_jaxpr jit pjit remat remat2 shard_map
""")
_MOVES = _names("""
  all_gather all_to_all bitcast_convert_type broadcast_in_dim complex concatenate
  conj convert_element_type copy copy_p device_put dynamic_slice
  dynamic_update_slice empty2 expand_dims gather imag iota name
  optimization_barrier pad ppermute pvary real reduce_precision reshape rev scatter
  select_n sharding_constraint slice split squeeze stack stop_gradient tile
  transpose unstack
""")
_ELEMENTWISE = _names("""
  abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp cos cosh
  cumlogsumexp cummax cummin cumprod cumsum digamma div erf erf_inv erfc exp exp2
  expm1 floor lgamma log log1p logistic max min mul neg nextafter pmax pmin pow psum
  psum2 psum_invariant rem round rsqrt sign sin sinh sqrt square sub tan tanh
""")
_REDUCTIONS = _names("""
  argmax argmin reduce_max reduce_min reduce_prod reduce_sum
""")
_SCATTERS = _names("scatter-add scatter_max scatter_min scatter_mul")


class FlopCount(NamedTuple):
  """The cost of a function.

  Attributes:
    flops: floating-point operations of one call.
    uncounted: operations that `flops` leaves out, one line each.
  """

  flops: float
  uncounted: tuple[str, ...]


def count(function: Callable[..., Any], *args: Any) -> FlopCount:
  """Counts the operations of one call.

  Args:
    function: a function that `jax.jit` accepts.
    args: its arguments; a `jax.ShapeDtypeStruct` may replace an array.

  Returns:
    A `FlopCount`. Cost: one trace, and a walk that grows with the number of equations
    and with the iterations of loops that contain loops of varying length.
  """
  closed, walk = jax.make_jaxpr(function)(*args), _Walk()
  # 64 bits count the operations exactly.
  with jax.enable_x64(True):
    unknown = [None] * len(closed.jaxpr.invars)
    flops = jax.jit(lambda: walk.count(closed, unknown)[0])()
  return FlopCount(float(flops), tuple(walk.uncounted))


class _Walk:
  """Sums operations in a program that computes only the bounds of loops.

  Unknown values are None. A cost is a `float` if it does not depend on values, and an
  array of the program otherwise.
  """

  def __init__(self):
    self.uncounted: dict[str, None] = {}

  def count(self, inner: Any, known: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns the operations of a jaxpr, and its known results."""
    jaxpr, consts = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
    values = dict(zip(jaxpr.constvars, map(_constant, consts), strict=True))
    values |= zip(jaxpr.invars, known, strict=True)

    def value_of(x):
      if not isinstance(x, Literal):
        return values.get(x)
      aval: Any = x.aval
      return np.asarray(x.val, aval.dtype) if _is_small(aval) else None

    total = 0.0
    for eqn in jaxpr.eqns:
      cost, results = self._equation(eqn, [value_of(x) for x in eqn.invars])
      total += cost
      values |= zip(eqn.outvars, results, strict=False)
    return total, [value_of(x) for x in jaxpr.outvars]

  def _equation(self, eqn: JaxprEqn, known: list[Any]) -> tuple[Any, Any]:
    name, params = eqn.primitive.name, eqn.params
    if name == "cond":
      costs = [self.count(x, known[1:])[0] for x in params["branches"]]
      if known[0] is None:
        return jnp.array(costs).max(), ()
      return jnp.array(costs)[jnp.clip(known[0], 0, len(costs) - 1)], ()
    if name in ("while", "scan"):
      return self._loop(eqn, known), ()
    if name in _CALLS:
      body = params.get("jaxpr") or params["call_jaxpr"]
      if name != "shard_map":
        return self.count(body, known)
      sizes = params["mesh"].shape
      devices = math.prod(sizes[axis] for axis in params["newly_manual_axes"])
      # Inside, arrays are shards of the arrays outside; scalars are the same.
      known = [x if x is not None and x.ndim == 0 else None for x in known]
      return devices * self.count(body, known)[0], ()
    if name == "custom_linear_solve":
      # Arguments of four functions, of which only the third runs, and the
      # right-hand side.
      sizes = params["const_lengths"]
      start = sizes.matvec + sizes.vecmat
      inputs = known[start : start + sizes.solve] + known[sum(sizes) :]
      return self.count(params["jaxprs"].solve, inputs)
    if (cost := _cost(eqn)) is None:
      self._report(eqn, "no rule for it, counted as 0")
    is_known = all(x is not None for x in known) and not eqn.effects
    if cost or not is_known or not all(_is_small(x.aval) for x in eqn.outvars):
      return cost or 0.0, ()
    results = eqn.primitive.bind(*known, **params)
    return 0.0, results if eqn.primitive.multiple_results else [results]

  def _report(self, eqn: JaxprEqn, reason: str) -> None:
    line = source_info_util.summarize(eqn.source_info) or "unknown source"
    line = line.rpartition("/")[2]
    self.uncounted[f"{eqn.primitive.name} at {line}: {reason}"] = None

  def _loop(self, eqn: JaxprEqn, known: list[Any]) -> Any:
    """Returns the operations of all iterations of a `while` or `scan`."""
    params, is_scan = eqn.params, eqn.primitive.name == "scan"
    if is_scan:
      # Scanned inputs and stacked results are identified by their shapes, which works
      # in every version of JAX: they have one more axis outside the body than inside.
      body = params["jaxpr"].jaxpr
      carry = len(eqn.outvars) - _longer(eqn.outvars, body.outvars)
      tests, last = 0, len(known) - _longer(eqn.invars, body.invars)
    else:
      body, carry = params["body_jaxpr"], len(eqn.outvars)
      tests, last = params["cond_nconsts"], len(known)
    tested, fixed = known[:tests], known[tests : last - carry]
    state, rows = known[last - carry : last], known[last:]

    def step(total_and_state, row):
      total, state = total_and_state
      outcome[:] = cost, results = self.count(body, [*fixed, *state, *row])
      pairs = zip(state, results, strict=False)
      state = [None if x is None else y for x, y in pairs]
      return (total + cost, state), None

    # Find the fixed point: a carried value is known in every iteration if it
    # follows only from values that are known in every iteration.
    outcome: list[Any] = [0.0, ()]
    row = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows
    )
    previous = None
    while previous != (previous := [x is None for x in state]):
      jax.eval_shape(step, (0.0, state), row)
      pairs = zip(state, outcome[1], strict=False)
      state = [None if y is None else x for x, y in pairs]

    start = jnp.zeros(()), state
    if is_scan:
      if isinstance(outcome[0], float):
        return params["length"] * outcome[0]
      ended, _ = jax.lax.scan(
        step, start, rows, params["length"], params["reverse"]
      )
      return ended[0]

    def test(total_and_state):
      known = [*tested, *total_and_state[1]]
      return self.count(params["cond_jaxpr"], known)[1][0]

    if test(start) is None:
      self._report(eqn, "its end depends on the data, counted as 0 iterations")
      return 0.0
    return jax.lax.while_loop(test, lambda now: step(now, ())[0], start)[0]


def _longer(outside: Sequence[Any], inside: Sequence[Any]) -> int:
  pairs = zip(outside, inside, strict=True)
  return sum(x.aval.ndim > y.aval.ndim for x, y in pairs)


def _cost(eqn: JaxprEqn) -> float | None:
  """Returns the operations of an equation without inner jaxpr; None without a rule."""
  name, params = eqn.primitive.name, eqn.params
  operands: list[Any] = [x.aval for x in eqn.invars]
  results: list[Any] = [x.aval for x in eqn.outvars]
  if name in ("sort", "top_k"):
    length = operands[0].shape[params.get("dimension", -1)]
    return operands[0].size * math.log2(max(length, 1))
  if name in _MOVES or not any(map(_is_float, operands + results)):
    return 0.0
  if name in _ELEMENTWISE:
    return float(sum(x.size for x in results if _is_float(x)))
  if name in _REDUCTIONS:
    return float(operands[0].size)
  if name in _SCATTERS:
    return float(operands[2].size)
  size = float(results[0].size)
  match name:
    case "integer_pow":
      power = params["y"]  # Both counts ignore its sign.
      return size * max(power.bit_length() - 2 + power.bit_count(), 0)
    case "dot_general":
      (contracted, _), _ = params["dimension_numbers"]
      return 2 * size * math.prod(operands[0].shape[i] for i in contracted)
    case "conv_general_dilated":
      kernel = operands[1]
      features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
      return 2 * size * kernel.size / features
    case "reduce_window_sum":
      return size * math.prod(params["window_dimensions"])
    case "qr":
      *batch, rows, columns = operands[0].shape
      small = min(rows, columns)
      return 4.0 * math.prod(batch) * (rows * columns * small - small**3 / 3)
  # Comparisons and conversions have no floating-point result.
  return None if any(map(_is_float, results)) else 0.0


def _is_float(aval: Any) -> bool:
  return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact)


def _is_small(aval: Any) -> bool:
  """Returns whether an array could be a loop bound: a number or short vector."""
  dtype = getattr(aval, "dtype", None)
  if dtype is None or aval.ndim > 1 or aval.size > 2**16:
    return False
  return dtype == np.bool_ or jnp.issubdtype(dtype, jnp.integer)


def _constant(x: Any) -> Any:
  """Returns the array as a known value if it is small, else None."""
  is_known = not isinstance(x, jax.core.Tracer) and _is_small(jax.typeof(x))
  return x if is_known else None
