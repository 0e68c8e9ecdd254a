"""A call equals the definition, values and gradients."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.testing.calls import Case, assert_close, require, split
from attention.testing.check import Check
from attention.testing.mechanism import Mechanism, in_float64

# Longer than a block, so that states and windows cross from one to the next.
_LONG = Case(("mask",), length=307, batch=1)
_ALONE = (
  Case(num_kv_heads=4),
  Case(("causal",)),
  Case(("scale",), length=7),
  Case(("mask",), num_kv_heads=1),
  Case(("full_mask", "scale")),
  Case(("segments",)),
  Case(("bias",)),
  Case(("relative_bias",)),
  Case(("relative_keys", "causal"), num_kv_heads=1),
  Case(("relative_keys_by_head", "mask"), length=7, source_length=13),
  Case(("sinks", "mask"), num_kv_heads=4),
  Case(("logits_soft_cap", "scale")),
  Case(("log_forget", "causal", "mask")),
  Case(("global",), num_kv_heads=4),
  # One position, a prime number of them, cross in both directions.
  Case(("causal",), length=1),
  Case(("mask",), length=7, value_dim=5, num_kv_heads=4),
  Case((), length=13, source_length=7, num_kv_heads=1),
  Case(("causal",), length=7, source_length=13),
  _LONG,
  _LONG._replace(options=("log_forget", "causal", "sinks")),
)
_TOGETHER = (
  Case(("mask", "scale"), length=7, source_length=13, value_dim=11),
  Case(("causal", "mask"), length=13, source_length=7),
  Case(("causal", "mask", "scale"), value_dim=5),
  Case(("causal", "full_mask", "segments", "bias"), num_kv_heads=1),
  Case(("mask", "segments"), length=7, source_length=13),
  Case(("causal", "mask", "segments"), num_kv_heads=4),
  Case(("relative", "mask", "scale"), length=7, source_length=13),
  Case(("relative", "bias", "causal", "segments")),
  Case(
    ("relative_bias", "relative_keys_by_head", "mask", "scale"), num_kv_heads=1
  ),
  _LONG._replace(options=("relative_keys_by_head", "causal")),
  Case(("sinks", "logits_soft_cap", "relative", "causal", "segments")),
  Case(("global", "sinks", "logits_soft_cap"), num_kv_heads=1),
  Case(("global", "global_qkv", "mask", "scale"), value_dim=5),
  Case(("global", "global_qkv", "causal", "mask", "segments")),
  Case(("global", "causal"), num_kv_heads=1),
  _LONG._replace(options=("causal", "mask")),
)
_HALF = (
  Case(("mask",), num_kv_heads=4),
  Case(("causal", "mask")),
  Case(("causal", "segments")),
)

_DIFFERENTIABLE = (
  "bias",
  "relative_bias",
  "relative_keys",
  "sinks",
  "log_forget",
  "global_qkv",
)


def _differentiable(tree: Any) -> dict[str, Any]:
  """Names of the leaves that a gradient is checked for."""
  variables, qkv, call = tree
  names = ("query", "value") if len(qkv) == 2 else ("query", "key", "value")
  return {
    "params": variables.get("params", {}),
    "arrays": dict(zip(names, qkv, strict=True)),
    **{name: call.get(name) for name in _DIFFERENTIABLE},
  }


def _replaced(tree: Any, leaves: dict[str, Any]) -> Any:
  """`tree` with the leaves of `_differentiable` exchanged."""
  variables, _, call = tree
  if leaves["params"]:
    variables = {**variables, "params": leaves["params"]}
  for name in _DIFFERENTIABLE:
    if leaves[name] is not None:
      call = {**call, name: leaves[name]}
  # JAX sorts the names of a dict.
  arrays = leaves["arrays"]
  qkv = [arrays[x] for x in ("query", "key", "value") if x in arrays]
  return variables, qkv, call


def _value_and_gradient(mechanism: Mechanism, case: Case) -> None:
  """The result and all gradients are those of the definition."""
  tree = (mechanism.variables(case.dims), *mechanism.draw(case))
  arrays, rebuild = split(tree)
  rng = np.random.default_rng(1)
  shape = (*tree[1][0].shape[:-1], case.value_dim)
  cotangent = rng.standard_normal(shape, np.float32)

  @jax.jit
  def run(arrays, cotangent):
    tree = rebuild(arrays)

    def call(leaves):
      variables, qkv, call = _replaced(tree, leaves)
      return mechanism.attention.apply(variables, *qkv, **call)

    out, vjp = jax.vjp(call, _differentiable(tree))
    require(
      (out.shape, out.dtype) == (shape, jnp.float32),
      f"the result is {out.dtype} {out.shape}, expected float32 {shape}",
    )
    return out, vjp(cotangent)

  out, (gradient,) = run(arrays, cotangent)
  in_double = in_float64(tree)
  paths, treedef = jax.tree_util.tree_flatten_with_path(
    _differentiable(in_double)
  )
  names = [jax.tree_util.keystr(path) for path, _ in paths]
  leaves = [leaf for _, leaf in paths]

  def naive(leaves):
    variables, qkv, call = _replaced(in_double, treedef.unflatten(leaves))
    return mechanism.define(variables, *qkv, **call)

  assert_close(out, naive(leaves), 1e-5)

  gradient = in_float64(treedef.flatten_up_to(gradient))
  for name, grad in zip(names, gradient, strict=True):
    require(np.isfinite(grad).all(), f"the gradient of {name} is not finite")
  norm = np.sqrt(sum((x**2).sum() for x in gradient))
  directions = [rng.standard_normal(x.shape) for x in leaves]

  def difference(where):
    """Gradient and central difference along `directions` of some leaves."""
    step = 1e-6
    ahead, behind = (
      naive(
        [
          x + h * d if i in where else x
          for i, (x, d) in enumerate(zip(leaves, directions, strict=True))
        ]
      )
      for h in (step, -step)
    )
    found = sum((gradient[i] * directions[i]).sum() for i in where)
    return found, ((ahead - behind) * cotangent).sum() / (2 * step)

  def is_off(found, expected):
    return not abs(found - expected) <= 1e-5 * norm

  # All leaves at once; one by one only to say which of them are wrong.
  if is_off(*difference(range(len(leaves)))):
    each = {name: difference([i]) for i, name in enumerate(names)}
    wrong = [
      f"the gradient of {name} along a random direction is {found:.6g} and "
      f"should be {expected:.6g}, by central differences of the definition"
      for name, (found, expected) in each.items()
      if is_off(found, expected)
    ]
    raise AssertionError("\n".join(wrong) or "the sum of all gradients is off")


def _half_precision(mechanism: Mechanism, case: Case) -> None:
  """Logits and softmax are float32 although the inputs are bfloat16."""
  variables = mechanism.variables(case.dims)
  qkv, call = mechanism.draw(case)
  qkv[0] *= 4.0  # Logits near 10, which bfloat16 would round by 0.03.
  rounded = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
  arrays, rebuild = split(call)

  @jax.jit
  def run(variables, qkv, arrays):
    return mechanism.attention.apply(variables, *qkv, **rebuild(arrays))

  out = run(variables, rounded, arrays)
  require(
    out.dtype == jnp.bfloat16,
    f"the result is {out.dtype}, expected the dtype of query, bfloat16",
  )
  variables, rounded = in_float64((variables, rounded))
  assert_close(out, mechanism.define(variables, *rounded, **call), 2e-2)


def _checks(law, name, advice, cases, every_setting):
  return [
    Check(
      f"{name}[{case}]",
      partial(law, case=case),
      advice,
      needs=case.needs,
      every_setting=every_setting,
    )
    for case in cases
  ]


_VALUE = (
  "The call must equal the definition within 1e-5, and so must its gradients "
  "with respect to query, key, value, params and tables. The name tells the "
  "sizes and options of the call. Compare the two on that call, `Case(…).draw()`"
  " of attention.testing. An option that cannot be honoured must leave "
  "`supports`; `scale` has to be taken by every mechanism."
)
_BFLOAT16 = (
  "Inputs in bfloat16 must give a result in bfloat16 within 2e-2 of the "
  "definition. Compute logits, softmax and normalisers in float32 "
  "(`preferred_element_type=jnp.float32`) and convert the result at the end."
)

CHECKS = (
  *_checks(_value_and_gradient, "value_and_gradient", _VALUE, _ALONE, False),
  *_checks(_value_and_gradient, "value_and_gradient", _VALUE, _TOGETHER, True),
  *_checks(_half_precision, "bfloat16", _BFLOAT16, _HALF, False),
)
