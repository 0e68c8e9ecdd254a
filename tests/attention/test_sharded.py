"""Arrays sharded along batch or heads are computed where they are."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec
import numpy as np
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys
from tests.attention.forms import FORMS, RECURRENT, SIZES, thorough

BATCH, LENGTH, HEADS, HEAD_DIM = 4, 64, 8, 8
SHARDINGS = {
  "batch": (HEADS, PartitionSpec(("x", "y"))),
  "heads": (HEADS, PartitionSpec(None, None, ("x", "y"))),
  "grouped heads": (4, PartitionSpec(None, None, ("x", "y"))),
  "batch and grouped heads": (4, PartitionSpec("x", None, "y")),
}
_ALIKE = {*RECURRENT} - {"gated_linear", "kimi_delta"}
"""Recurrences whose code one of these two has."""


@functools.cache
def program(name, is_causal, kv_heads):
  """Output and gradients to query, key and value; arguments; both on one device."""
  mechanism = ATTENTIONS[name](**SIZES.get(name, {}))
  # What all heads share is whole on every device.
  shared = {}
  if "own_keys" not in mechanism.supports:
    mechanism = gates_from_keys(mechanism)
  dims = Dims(HEADS, kv_heads, HEAD_DIM, LENGTH, kv_heads * HEAD_DIM)
  variables = mechanism.init(jax.random.key(0), dims)
  rng = np.random.default_rng(0)
  query, cotangent, key, value = (
    jnp.asarray(rng.standard_normal((BATCH, LENGTH, n, HEAD_DIM)), jnp.float32)
    for n in (HEADS, HEADS, kv_heads, kv_heads)
  )
  if "own_keys" in mechanism.supports:
    inputs = key.reshape(BATCH, LENGTH, -1)
    shared = mechanism.gates(variables, inputs)
  if {"shared_qk", "own_keys"} & mechanism.supports:
    key = None

  def run(query, key, value, cotangent):
    def attend(query, key, value):
      call = {"is_causal": is_causal, **shared}
      return mechanism.apply(variables, query, key, value, **call)

    out, pullback = jax.vjp(attend, query, key, value)
    return out, pullback(cotangent)

  arguments = (query, key, value, cotangent)
  return run, arguments, jax.jit(run)(*arguments)


@pytest.mark.parametrize(
  "name",
  [
    *("dense", "sliding_window", "performer", "kimi_delta"),
    *thorough(("flash",), ("linear",), ("gated_linear",)),
    *thorough(*((name,) for name in RECURRENT if name in _ALIKE)),
  ],
)
def test_meshes_may_have_explicit_axes(name):
  mesh = jax.make_mesh(
    (2, 2),
    ("x", "y"),
    axis_types=(AxisType.Explicit,) * 2,
    devices=jax.devices()[:4],
  )
  run, arguments, want = program(name, True, 4)
  placed = jax.device_put(
    arguments, NamedSharding(mesh, PartitionSpec("x", None, "y"))
  )
  with jax.set_mesh(mesh):
    found = jax.jit(run)(*placed)
  for got, expected in zip(*map(jax.tree.leaves, (found, want)), strict=True):
    assert jax.typeof(got).sharding.spec[:3] == ("x", None, "y")
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=2e-5 * scale)


@pytest.mark.parametrize(
  "sharding",
  [
    *(
      pytest.param(name, marks=pytest.mark.thorough)
      for name in SHARDINGS
      if name != "batch and grouped heads"
    ),
    "batch and grouped heads",
  ],
)
@pytest.mark.parametrize(
  ("name", "is_causal"),
  [
    # Each mechanism in its last direction, causal if it can.
    pytest.param(
      name,
      is_causal,
      marks=pytest.mark.thorough
      if name in _ALIKE or (not is_causal and (name, True) in FORMS)
      else [],
    )
    for name, is_causal in FORMS
  ],
)
def test_nothing_is_gathered(name, is_causal, sharding):
  kv_heads, spec = SHARDINGS[sharding]
  mesh = jax.make_mesh(
    (2, 2),
    ("x", "y"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[:4],
  )
  run, arguments, want = program(name, is_causal, kv_heads)
  placed = jax.device_put(arguments, NamedSharding(mesh, spec))
  compiled = jax.jit(run).lower(*placed).compile()
  text = compiled.as_text()
  gathers = [
    line for line in text.splitlines() if " all-gather" in line.split("=")[-1]
  ]
  assert not gathers, gathers
  for got, expected in zip(
    jax.tree.leaves(compiled(*placed)), jax.tree.leaves(want), strict=True
  ):
    assert got.sharding.is_equivalent_to(placed[0].sharding, got.ndim)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(got, expected, atol=2e-5 * scale)
