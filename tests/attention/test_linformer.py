"""Linformer beside the contract suite: projections, ranks, shorter inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, linformer, linformer_attention
from attention.testing import assert_close

_DIMS = Dims(num_heads=4, num_kv_heads=2, head_dim=8, max_length=12)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_factory_makes_the_projections_it_names(shared, per_head):
  attention = linformer(rank=5, shared=shared, per_head=per_head)
  params = attention.init(jax.random.key(0), _DIMS)["params"]
  expected = {"key_projection"} | (set() if shared else {"value_projection"})
  assert set(params) == expected
  shape = (2, 12, 5) if per_head else (12, 5)
  assert all(p.shape == shape for p in params.values())
  # N(0, 1/R): the variance of a projected unit vector is 1 in all.
  wide = linformer(rank=64).init(
    jax.random.key(1), _DIMS._replace(max_length=256)
  )["params"]["key_projection"]
  assert float(jnp.mean(jnp.sum(wide**2, axis=1))) == pytest.approx(1, abs=0.05)


def test_shorter_input_uses_the_first_rows():
  keys = jax.random.split(jax.random.key(0), 4)
  query = jax.random.normal(keys[0], (1, 5, 4, 8))
  key, value = (jax.random.normal(k, (1, 7, 2, 8)) for k in keys[1:3])
  projection = jax.random.normal(keys[3], (12, 3))
  whole = linformer_attention(query, key, value, key_projection=projection)
  first = linformer_attention(query, key, value, key_projection=projection[:7])
  np.testing.assert_array_equal(whole, first)


def test_rank_above_the_length_is_refused_with_the_way_out():
  with pytest.raises(ValueError, match="rank ≤ 12 or dense attention"):
    linformer(rank=13).init(jax.random.key(0), _DIMS)


def test_projection_shorter_than_the_input_is_refused():
  x = jnp.ones((1, 9, 2, 8))
  with pytest.raises(ValueError, match=r"rows for 8 positions, .* keys have 9"):
    linformer_attention(x, x, x, key_projection=jnp.ones((8, 3)))


def test_ranks_must_agree():
  x = jnp.ones((1, 4, 2, 8))
  with pytest.raises(ValueError, match="value_projection: expected the rank"):
    linformer_attention(
      x,
      x,
      x,
      key_projection=jnp.ones((4, 3)),
      value_projection=jnp.ones((4, 2)),
    )


@pytest.mark.parametrize("per_head", [False, True])
def test_blocks_leave_no_seam(tiny_tiles, per_head):
  """Lengths that no block divides, projections longer than the input."""
  tiny_tiles(128)
  rng = np.random.default_rng(0)
  shapes = (2, 300, 4, 8), (2, 150, 2, 8), (2, 150, 2, 5)
  shape = (2, 160, 6) if per_head else (160, 6)
  leaves = [
    jnp.asarray(rng.standard_normal(s, np.float32))
    for s in (*shapes, shape, shape)
  ]
  leaves[3:] = [x / 12 for x in leaves[3:]]
  keep = jnp.asarray(rng.random((2, 150)) < 0.8)

  def blocked(query, key, value, e, f):
    return linformer_attention(
      query,
      key,
      value,
      key_projection=e,
      value_projection=f,
      mask=keep[:, None, None],
    )

  def whole(query, key, value, e, f):
    e, f = (jnp.broadcast_to(x[..., :150, :], (2, 150, 6)) for x in (e, f))
    key, value = (
      jnp.where(keep[:, :, None, None], x, 0.0) for x in (key, value)
    )
    keys = jnp.repeat(jnp.einsum("KSR,BSKH->BRKH", e, key), 2, axis=2)
    values = jnp.repeat(jnp.einsum("KSR,BSKV->BRKV", f, value), 2, axis=2)
    logits = jnp.einsum("BTNH,BRNH->BNTR", query, keys) / 8**0.5
    return jnp.einsum("BNTR,BRNV->BTNV", jax.nn.softmax(logits), values)

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(attend, *leaves):
    out, pullback = jax.vjp(attend, *leaves)
    return out, *pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

  for got, expected in zip(
    gradients(blocked, *leaves), gradients(whole, *leaves), strict=True
  ):
    assert_close(got, expected, 1e-5)


def test_memory_is_that_of_the_gradients_alone():
  """Nothing of T×R or of the keys' size beside what is returned."""
  x = jax.ShapeDtypeStruct((1, 8192, 2, 16), jnp.float32)
  e = jax.ShapeDtypeStruct((8192, 64), jnp.float32)

  def loss(query, key, value, e):
    out = linformer_attention(query, key, value, key_projection=e)
    return jnp.sum(out * out)

  for function, arrays in ((loss, 1), (jax.grad(loss, (0, 1, 2)), 4)):
    compiled = jax.jit(function).lower(x, x, x, e).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    assert temp <= arrays * 4 * 8192 * 2 * 16 + 2**20 + 2**10
