"""Linformer beside the contract suite: projections, ranks, shorter inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, linformer, linformer_attention

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
