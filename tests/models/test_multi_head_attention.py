"""Attention modules work with any mechanism that keeps the contract."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Attention, Dims, dense, dense_attention
from models.attention_module_config import SlotConfig
from models.multi_head_attention import MultiHeadAttention

DIMS = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=6)
RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 6, 16), np.float32)
Y = RNG.standard_normal((2, 5, 7), np.float32)


def made(mechanism=None, dims=DIMS, features=10, config=None, arrays=(X,)):
  """A module, its variables, and its kernels by name."""
  module = MultiHeadAttention(
    mechanism or dense(), dims, features, config or SlotConfig()
  )
  variables = jax.jit(module.init)(jax.random.key(1), *arrays)
  params = variables["params"].items()
  return module, variables, {k: v["kernel"] for k, v in params if "kernel" in v}


def by_hand(kernels, x, y, shapes, **call):
  """Projections, heads, dense attention, and the last projection."""

  @jax.jit
  def run(kernels):
    query, key, value = (
      (rows @ kernels[name]).reshape(*rows.shape[:2], *shape)
      for name, rows, shape in zip(
        ("query", "key", "value"), (x, y, y), shapes, strict=True
      )
    )
    if key.shape[2] < value.shape[2]:
      times = value.shape[2] // key.shape[2]
      query, key = (jnp.repeat(z, times, axis=2) for z in (query, key))
    out = dense_attention(query, key, value, **call)
    return out.reshape(*x.shape[:2], -1) @ kernels["out"]

  return run(kernels)


def scaled(call_log):
  """Dense attention with one trained and one constant variable."""

  def init(key, dims):
    gain = jax.random.normal(key, (dims.num_heads,))
    return {"params": {"gain": gain}, "constants": {"sign": jnp.sign(gain)}}

  def apply(variables, query, key, value, **call):
    call_log.append(call)
    gain = variables["params"]["gain"] * variables["constants"]["sign"]
    return dense_attention(
      query * gain[None, None, :, None], key, value, **call
    )

  return Attention(init, apply, None, None, frozenset())


def test_variables_go_to_their_collections():
  log = []
  module, variables, kernels = made(scaled(log), features=16)
  gain = variables["params"]["attention"]["gain"]
  # Both come from one call of `init`, so they belong together.
  np.testing.assert_array_equal(
    np.sign(gain), variables["constants"]["attention"]["sign"]
  )
  assert set(variables["params"]["key"]) == {"kernel"}
  assert kernels["key"].shape == (16, 16)
  assert kernels["query"].shape == (16, 32)
  other = jax.jit(module.init)(jax.random.key(2), X)["params"]["attention"]
  assert np.abs(gain - other["gain"]).max() > 0.1
  log.clear()
  jax.eval_shape(lambda: module.apply(variables, X, is_causal=True))
  assert log == [{"is_causal": True}]


def test_slot_is_the_formula():
  module, variables, kernels = made(features=16)
  y = X[::-1]
  ids = np.array([[0, 0, 0, 1, 1, 1]] * 2)
  segments = {"query_segment_ids": ids, "key_segment_ids": ids}
  expected = by_hand(kernels, X, y, ((4, 8), (2, 8), (2, 8)), **segments)
  call = {"mutable": ["intermediates"], **segments}
  got, state = jax.jit(lambda v: module.apply(v, X, y, **call))(variables)
  np.testing.assert_allclose(got, expected, atol=1e-5)
  weights = np.asarray(state["intermediates"]["attention_weights"][0])
  assert weights.shape == (2, 4, 6, 6)
  assert not weights[:, :, :3, 3:].any()


@pytest.mark.parametrize(
  ("dims", "config", "arrays", "shapes"),
  [
    # Values of a width of their own, of another sequence.
    (DIMS, {"value_dim": 3}, (X, Y), ((4, 8), (2, 8), (2, 3))),
    # Heads of values that share queries and keys.
    (
      *(DIMS._replace(num_kv_heads=4), {"value_dim": 3, "num_qk_heads": 2}),
      *((X,), ((2, 8), (2, 8), (4, 3))),
    ),
  ],
)
def test_sizes_of_their_own(dims, config, arrays, shapes):
  module, variables, kernels = made(
    dims=dims, config=SlotConfig(**config), arrays=arrays
  )
  widths = [np.prod(shape) for shape in shapes]
  inputs = [arrays[0].shape[-1], *[arrays[-1].shape[-1]] * 2]
  assert [kernels[x].shape for x in ("query", "key", "value")] == list(
    zip(inputs, widths, strict=True)
  )
  assert kernels["out"].shape == (12, 10)
  expected = by_hand(kernels, arrays[0], arrays[-1], shapes)
  got = jax.jit(module.apply)(variables, *arrays)
  np.testing.assert_allclose(got, expected, atol=1e-5)
