"""The slot hosts any record that keeps the contract of the plug."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import Attention, Dims, dense, dense_attention
from models.multi_head_attention import MultiHeadAttention
from models.slot_config import SlotConfig

DIMS = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=6)


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
  slot = MultiHeadAttention(scaled(log), DIMS, features=16)
  x = jax.random.normal(jax.random.key(0), (2, 6, 16))
  variables = slot.init(jax.random.key(1), x)
  gain = variables["params"]["attention"]["gain"]
  # Both come from one call of `init`, so they belong together.
  np.testing.assert_array_equal(
    jnp.sign(gain), variables["constants"]["attention"]["sign"]
  )
  assert variables["params"]["key"] == {
    "kernel": variables["params"]["key"]["kernel"]
  }
  assert variables["params"]["key"]["kernel"].shape == (16, 16)
  assert variables["params"]["query"]["kernel"].shape == (16, 32)
  other = slot.init(jax.random.key(2), x)["params"]["attention"]["gain"]
  assert np.abs(gain - other).max() > 0.1

  log.clear()
  slot.apply(variables, x, is_causal=True)
  assert log == [{"is_causal": True}]


def test_slot_is_the_formula():
  slot = MultiHeadAttention(dense(), DIMS, features=16)
  x, y = jax.random.normal(jax.random.key(0), (2, 2, 6, 16))
  variables = slot.init(jax.random.key(1), x)
  kernels = {k: v["kernel"] for k, v in variables["params"].items()}
  query = (x @ kernels["query"]).reshape(2, 6, 4, 8)
  key = (y @ kernels["key"]).reshape(2, 6, 2, 8)
  value = (y @ kernels["value"]).reshape(2, 6, 2, 8)
  ids = jnp.array([[0, 0, 0, 1, 1, 1]] * 2)
  segments = {"query_segment_ids": ids, "key_segment_ids": ids}
  out = dense_attention(query, key, value, **segments).reshape(2, 6, 32)
  got, state = slot.apply(
    variables, x, y, mutable=["intermediates"], **segments
  )
  np.testing.assert_allclose(got, out @ kernels["out"], atol=1e-5)
  weights = state["intermediates"]["attention_weights"][0]
  assert weights.shape == (2, 4, 6, 6)
  assert not weights[:, :, :3, 3:].any()


def test_dropout_reaches_the_mechanism():
  log = []
  slot = MultiHeadAttention(scaled(log), DIMS, features=16, dropout_rate=0.5)
  x = jnp.ones((1, 6, 16))
  variables = slot.init(jax.random.key(1), x)
  log.clear()
  rngs = {"dropout": jax.random.key(3)}
  slot.apply(variables, x, deterministic=False, rngs=rngs)
  assert log[0]["dropout_rate"] == 0.5


def test_values_of_their_own_width():
  slot = MultiHeadAttention(
    dense(), DIMS, features=10, config=SlotConfig(value_dim=3)
  )
  x = jax.random.normal(jax.random.key(0), (2, 6, 16))
  y = jax.random.normal(jax.random.key(1), (2, 5, 7))
  variables = slot.init(jax.random.key(2), x, y)
  kernels = {k: v["kernel"] for k, v in variables["params"].items()}
  assert {k: v.shape for k, v in kernels.items()} == {
    "query": (16, 32),
    "key": (7, 16),
    "value": (7, 6),
    "out": (12, 10),
  }
  query = (x @ kernels["query"]).reshape(2, 6, 4, 8)
  key = (y @ kernels["key"]).reshape(2, 5, 2, 8)
  value = (y @ kernels["value"]).reshape(2, 5, 2, 3)
  out = dense_attention(query, key, value).reshape(2, 6, 12)
  got = slot.apply(variables, x, y)
  np.testing.assert_allclose(got, out @ kernels["out"], atol=1e-5)


def test_heads_of_values_that_share_queries_and_keys():
  dims = DIMS._replace(num_kv_heads=4)
  slot = MultiHeadAttention(
    dense(), dims, features=10, config=SlotConfig(value_dim=3, num_qk_heads=2)
  )
  x = jax.random.normal(jax.random.key(0), (2, 6, 16))
  variables = slot.init(jax.random.key(2), x)
  kernels = {k: v["kernel"] for k, v in variables["params"].items()}
  shapes = {k: v.shape for k, v in kernels.items()}
  assert shapes["query"] == shapes["key"] == (16, 16)
  query, key = (
    jnp.repeat((x @ kernels[name]).reshape(2, 6, 2, 8), 2, axis=2)
    for name in ("query", "key")
  )
  value = (x @ kernels["value"]).reshape(2, 6, 4, 3)
  out = dense_attention(query, key, value).reshape(2, 6, 12)
  got = slot.apply(variables, x)
  np.testing.assert_allclose(got, out @ kernels["out"], atol=1e-5)
