"""What one operation of a jaxpr costs, and its value where integers tell it."""

from collections.abc import Callable
import math
from typing import Any, cast

from jax.extend.core import JaxprEqn
import jax.numpy as jnp
import numpy as np

# fmt: off
_FREE = {
  "all_gather", "all_to_all", "bitcast_convert_type", "broadcast_in_dim",
  "complex", "concatenate", "conj", "convert_element_type", "copy",
  "copy_p", "device_put", "dynamic_slice", "dynamic_update_slice", "empty2",
  "expand_dims", "gather", "imag", "iota", "name", "optimization_barrier",
  "pad", "ppermute", "pvary", "real", "reduce_precision", "reshape", "rev",
  "scatter", "select_n", "sharding_constraint", "slice", "split", "squeeze",
  "stack", "stop_gradient", "tile", "transpose", "unstack",
}
_ELEMENTWISE = {
  "abs", "acos", "acosh", "add", "add_any", "asin", "asinh", "atan",
  "atan2", "atanh", "cbrt", "ceil", "clamp", "cos", "cosh", "cumlogsumexp",
  "cummax", "cummin", "cumprod", "cumsum", "digamma", "div", "erf",
  "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "lgamma", "log",
  "log1p", "logistic", "max", "min", "mul", "neg", "nextafter", "pmax",
  "pmin", "pow", "psum", "psum2", "psum_invariant", "rem", "round", "rsqrt",
  "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh",
}
_REDUCTIONS = {
  "argmax", "argmin", "reduce_max", "reduce_min", "reduce_prod",
  "reduce_sum",
}
_SCATTERS = {
  "scatter-add", "scatter_max", "scatter_min", "scatter_mul",
}
# fmt: on


def cost(eqn: JaxprEqn) -> float | None:
  """Floating-point operations of one equation that holds no jaxpr.

  Returns:
    The number by the rules of `flops`; None where there is no rule.
  """
  name, params = eqn.primitive.name, eqn.params
  operands: list[Any] = [x.aval for x in eqn.invars]
  results: list[Any] = [x.aval for x in eqn.outvars]
  if name in ("sort", "top_k"):
    length = operands[0].shape[params.get("dimension", -1)]
    return operands[0].size * math.log2(max(length, 1))
  if name in _FREE or not any(map(_is_float, operands + results)):
    return 0.0
  if name in _ELEMENTWISE:
    return float(sum(x.size for x in results if _is_float(x)))
  if name in _REDUCTIONS:
    return float(operands[0].size)
  if name in _SCATTERS:
    return float(operands[2].size)
  if name == "integer_pow":
    power = abs(params["y"])
    products = power.bit_length() - 2 + power.bit_count()
    return float(results[0].size * max(products, 0))
  if name == "dot_general":
    (contracted, _), _ = params["dimension_numbers"]
    terms = math.prod(operands[0].shape[axis] for axis in contracted)
    return 2.0 * results[0].size * terms
  if name == "conv_general_dilated":
    kernel = operands[1]
    features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
    return 2.0 * results[0].size * kernel.size / features
  if name == "reduce_window_sum":
    return float(results[0].size * math.prod(params["window_dimensions"]))
  if name == "qr":
    *batch, rows, columns = operands[0].shape
    small = min(rows, columns)
    return 4.0 * math.prod(batch) * (rows * columns * small - small**3 / 3)
  # Without a floating-point result: comparisons and conversions.
  return None if any(map(_is_float, results)) else 0.0


def _is_float(aval: Any) -> bool:
  return jnp.issubdtype(getattr(aval, "dtype", np.int32), jnp.inexact)


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Towards zero, as XLA divides."""
  return np.abs(x) // np.abs(y) * (np.sign(x) * np.sign(y))


def _broadcast(x, *, shape, broadcast_dimensions, **_):
  inner = np.ones(len(shape), int)
  inner[list(broadcast_dimensions)] = x.shape
  return np.broadcast_to(x.reshape(inner), shape)


def _dynamic_slice(x, *starts, slice_sizes, **_):
  corner = [
    int(np.clip(start, 0, size - part))
    for start, size, part in zip(starts, x.shape, slice_sizes, strict=True)
  ]
  return x[
    tuple(slice(a, a + b) for a, b in zip(corner, slice_sizes, strict=True))
  ]


def _slice(x, *, start_indices, limit_indices, strides, **_):
  strides = strides or (1,) * x.ndim
  cuts = zip(start_indices, limit_indices, strides, strict=True)
  return x[tuple(slice(*cut) for cut in cuts)]


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
  """A function of the arrays alone."""
  return lambda *arrays, **_: function(*arrays)


_EVALUATE: dict[str, Callable[..., Any]] = {
  "add": _plain(np.add),
  "sub": _plain(np.subtract),
  "mul": _plain(np.multiply),
  "div": _plain(_quotient),
  "rem": _plain(np.fmod),
  "neg": _plain(np.negative),
  "abs": _plain(np.abs),
  "sign": _plain(np.sign),
  "square": _plain(np.square),
  "max": _plain(np.maximum),
  "min": _plain(np.minimum),
  "clamp": _plain(lambda low, x, high: np.minimum(np.maximum(x, low), high)),
  "eq": _plain(np.equal),
  "ne": _plain(np.not_equal),
  "lt": _plain(np.less),
  "le": _plain(np.less_equal),
  "gt": _plain(np.greater),
  "ge": _plain(np.greater_equal),
  "and": _plain(np.bitwise_and),
  "or": _plain(np.bitwise_or),
  "xor": _plain(np.bitwise_xor),
  "not": _plain(np.invert),
  "select_n": _plain(lambda i, *cases: np.choose(i.astype(int), cases)),
  "convert_element_type": _plain(lambda x: x),
  "copy": _plain(lambda x: x),
  "stop_gradient": _plain(lambda x: x),
  "reduce_max": lambda x, *, axes, **_: np.max(x, axes),
  "reduce_min": lambda x, *, axes, **_: np.min(x, axes),
  "reduce_sum": lambda x, *, axes, **_: np.sum(x, axes),
  "integer_pow": lambda x, *, y, **_: x**y,
  "squeeze": lambda x, *, dimensions, **_: np.squeeze(x, dimensions),
  "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
  "iota": lambda *, shape, **_: np.arange(shape[0]),
  "broadcast_in_dim": _broadcast,
  "dynamic_slice": _dynamic_slice,
  "slice": _slice,
}


def is_small(aval: Any) -> bool:
  """If an array could be a bound: integers or truth values, at most a row."""
  dtype = getattr(aval, "dtype", None)
  return (
    dtype is not None
    and (jnp.issubdtype(dtype, jnp.integer) or dtype == np.bool_)
    and aval.ndim <= 1
    and aval.size <= 2**16
  )


def can_evaluate(eqn: JaxprEqn) -> bool:
  """If `evaluate` knows the operation."""
  return eqn.primitive.name in _EVALUATE and is_small(eqn.outvars[0].aval)


def evaluate(eqn: JaxprEqn, arrays: list[np.ndarray]) -> np.ndarray | None:
  """The value of one equation with integer operands; None for x / 0."""
  name, out = eqn.primitive.name, cast(Any, eqn.outvars[0].aval)
  if name in ("div", "rem") and not np.all(arrays[1]):
    return None
  # An overflow wraps around in XLA too.
  with np.errstate(over="ignore"):
    value = _EVALUATE[name](*arrays, **eqn.params)
  return np.asarray(value).astype(out.dtype)
