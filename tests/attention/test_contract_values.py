"""Every mechanism equals its naive float64 reference, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS
from tests.attention.cases import Case, assert_close, split
from tests.attention.mechanisms import MECHANISMS, ONE_EACH

# Longer than a block, so that states and windows cross from one to the next.
LONG = Case(("mask",), length=307, batch=1)
ALONE = (
  Case(num_kv_heads=4),
  Case(("causal",)),
  Case(("mask",), num_kv_heads=1),
  Case(("full_mask", "scale")),
  Case(("segments",)),
  Case(("bias",)),
  Case(("relative_bias",)),
  Case(("relative_keys", "causal"), num_kv_heads=1),
  Case(("global",), num_kv_heads=4),
  # One position, a prime number of them, cross in both directions.
  Case(("causal",), length=1),
  Case(("mask",), length=7, value_dim=5, num_kv_heads=4),
  Case((), length=13, source_length=7, num_kv_heads=1),
  Case(("causal",), length=7, source_length=13),
  LONG,
)
TOGETHER = (
  Case(("mask", "scale"), length=7, source_length=13, value_dim=11),
  Case(("causal", "mask"), length=13, source_length=7),
  Case(("causal", "mask", "scale"), value_dim=5),
  Case(("causal", "full_mask", "segments", "bias"), num_kv_heads=1),
  Case(("mask", "segments"), length=7, source_length=13),
  Case(("causal", "mask", "segments"), num_kv_heads=4),
  Case(("relative", "mask", "scale"), length=7, source_length=13),
  Case(("relative", "bias", "causal", "segments")),
  Case(("global", "global_qkv", "mask", "scale"), value_dim=5),
  Case(("global", "global_qkv", "causal", "mask", "segments")),
  Case(("global", "causal"), num_kv_heads=1),
  LONG._replace(options=("causal", "mask")),
)


DIFFERENTIABLE = ("bias", "relative_bias", "relative_keys", "global_qkv")


def supported(mechanisms, cases):
  """All `(mechanism, case)` where the mechanism claims to support the case."""
  return [
    pytest.param(mechanism, case, id=f"{mechanism}-{case}")
    for mechanism in mechanisms
    for case in cases
    if case.needs <= mechanism.build().supports
  ]


def test_the_suite_covers_every_mechanism():
  assert {mechanism.name for mechanism in MECHANISMS} == set(ATTENTIONS)


def differentiable(tree):
  """Names of the leaves that a gradient is checked for."""
  variables, qkv, call = tree
  return {
    "params": variables.get("params", {}),
    "qkv": qkv,
    **{name: call.get(name) for name in DIFFERENTIABLE},
  }


def replaced(tree, leaves):
  """`tree` with the leaves of `differentiable` exchanged."""
  variables, _, call = tree
  if leaves["params"]:
    variables = {**variables, "params": leaves["params"]}
  for name in DIFFERENTIABLE:
    if leaves[name] is not None:
      call = {**call, name: leaves[name]}
  return variables, leaves["qkv"], call


@pytest.mark.parametrize(
  ("mechanism", "case"),
  supported(ONE_EACH, ALONE) + supported(MECHANISMS, TOGETHER),
)
def test_value_and_gradient(mechanism, case):
  attention = mechanism.build()
  variables = attention.init(jax.random.key(0), case.dims)
  tree = (variables, *mechanism.draw(case))
  arrays, rebuild = split(tree)
  rng = np.random.default_rng(1)
  shape = (*tree[1][0].shape[:-1], case.value_dim)
  cotangent = rng.standard_normal(shape, np.float32)

  @jax.jit
  def run(arrays, cotangent):
    tree = rebuild(arrays)

    def call(leaves):
      variables, qkv, call = replaced(tree, leaves)
      return attention.apply(variables, *qkv, **call)

    out, vjp = jax.vjp(call, differentiable(tree))
    return out, vjp(cotangent)

  out, gradient = run(arrays, cotangent)
  assert out.dtype == jnp.float32

  in_float64 = jax.tree.map(
    lambda x: (
      np.asarray(x, np.float64)
      if jnp.issubdtype(jnp.result_type(x), jnp.floating)
      else x
    ),
    tree,
  )
  leaves, treedef = jax.tree.flatten(differentiable(in_float64))

  def naive(leaves):
    variables, qkv, call = replaced(in_float64, treedef.unflatten(leaves))
    return mechanism.reference(variables, *qkv, **call)

  assert_close(out, naive(leaves), 1e-5)

  # The gradient along random directions, by central differences.
  step = 1e-6
  gradient = [
    np.asarray(x, np.float64) for x in treedef.flatten_up_to(gradient[0])
  ]
  norm = np.sqrt(sum((x**2).sum() for x in gradient))
  for i, grad in enumerate(gradient):
    for _ in range(2):
      direction = rng.standard_normal(leaves[i].shape)
      ahead, behind = (
        naive([*leaves[:i], leaves[i] + h * direction, *leaves[i + 1 :]])
        for h in (step, -step)
      )
      expected = ((ahead - behind) * cotangent).sum() / (2 * step)
      error = abs((grad * direction).sum() - expected)
      assert error <= 1e-5 * norm, f"leaf {i}: {error / norm:.2e}"


@pytest.mark.parametrize(
  ("mechanism", "case"),
  supported(
    ONE_EACH,
    [
      Case(("mask",), num_kv_heads=4),
      Case(("causal", "mask")),
      Case(("causal", "segments")),
    ],
  ),
)
def test_bfloat16(mechanism, case):
  attention = mechanism.build()
  variables = attention.init(jax.random.key(0), case.dims)
  qkv, call = mechanism.draw(case)
  qkv[0] *= 4.0  # Logits near 10, which bfloat16 would round by 0.03.
  rounded = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
  arrays, rebuild = split(call)

  @jax.jit
  def run(variables, qkv, arrays):
    return attention.apply(variables, *qkv, **rebuild(arrays))

  out = run(variables, rounded, arrays)
  assert out.dtype == jnp.bfloat16
  expected = mechanism.reference(
    jax.tree.map(lambda x: np.asarray(x, np.float64), variables),
    *(np.asarray(x, np.float64) for x in rounded),
    **call,
  )
  assert_close(out, expected, 2e-2)
