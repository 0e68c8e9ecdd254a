"""Transforms random mechanisms with JAX and compares the results."""

from functools import partial

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from attention.testing.calls import Case, assert_close
from attention.testing.transforms import mesh_of_rows
from tests.attention.mechanisms import MECHANISMS
from tests.verification.campaign.faults import fault

_LENGTH = 13


def explicit_axes(apply, qkv, call):
  """Shards arrays along B with explicit axis types."""
  mesh = mesh_of_rows(jax.sharding.AxisType.Explicit)
  arrays = jax.device_put(
    (qkv, call), jax.sharding.NamedSharding(mesh, jax.P("batch"))
  )
  with jax.set_mesh(mesh):
    return _value_and_gradient(apply)(*arrays)


def vmap(apply, qkv, call):
  """Maps over one array at a time, stacked with a copy of itself."""
  arrays, tree = jax.tree.flatten((qkv, call))
  expected = jax.jit(apply)(qkv, call)
  for i, array in enumerate(arrays):

    def apply_one(x, i=i):
      return apply(
        *jax.tree.unflatten(tree, [*arrays[:i], x, *arrays[i + 1 :]])
      )

    out = jax.jit(jax.vmap(apply_one))(jnp.stack([array, array]))
    assert_close(out[1], expected, 1e-5, f"vmap over array {i}")


def hessian(apply, qkv, call):
  """Compares Hessian-vector products: forward over reverse, and reverse over it."""
  qkv, call = jax.tree.map(lambda x: x[:1], (qkv, call))
  start, unravel = ravel_pytree([jnp.asarray(x) for x in qkv])
  direction = np.random.default_rng(0).standard_normal(start.shape, np.float32)

  def total(x):
    return jnp.sin(apply(unravel(x), call)).sum()

  @jax.jit
  def products(x, direction):
    forward = jax.jvp(jax.grad(total), [x], [direction])[1]
    return forward, jax.grad(lambda x: jax.grad(total)(x) @ direction)(x)

  forward, reverse = products(start, direction)
  assert_close(forward, reverse, 1e-4, "the product with the Hessian")


def _value_and_gradient(apply):
  @jax.jit
  def both(qkv, call):
    out, vjp = jax.vjp(lambda qkv: apply(qkv, call), qkv)
    return out, vjp(jnp.sin(out))[0]

  return both


_TRANSFORMATIONS = (explicit_axes, vmap, hessian)
"""The contract tests `checkpoint` inside `shard_map`."""


@fault(
  "a random transformation of a mechanism", 500, "same values and gradients"
)
def transform(rng, folder):
  """Picks a mechanism, a direction that it supports, and a transformation."""
  del folder
  mechanism = MECHANISMS[rng.integers(len(MECHANISMS))]
  is_causal = bool(rng.choice(mechanism.directions))
  variables = mechanism.variables(Case(length=_LENGTH).dims)
  qkv, call = mechanism.draw_masked(_LENGTH, int(rng.integers(2**30)))
  apply = partial(mechanism.apply, variables, is_causal=is_causal)
  transformation = _TRANSFORMATIONS[rng.integers(len(_TRANSFORMATIONS))]
  try:
    results = transformation(lambda qkv, call: apply(qkv, **call), qkv, call)
    expected = _value_and_gradient(lambda qkv, call: apply(qkv, **call))
    if results is not None:
      for x, y in zip(
        jax.tree.leaves(results),
        jax.tree.leaves(expected(qkv, call)),
        strict=True,
      ):
        assert_close(x, y, 1e-5)
  except Exception as error:
    raise AssertionError(
      f"{transformation.__name__} of {mechanism}, is_causal={is_causal}: {error}"
    ) from error
  return ""
