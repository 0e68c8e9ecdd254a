"""Linear attention of sharded arrays is computed where they are.

The compiled program of value and gradients has no gather, sharded along the
batch or along the heads (grouped: the key heads).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  linear_attention,
  orthogonal_features,
  performer_attention,
)
from tests.attention.cases import assert_close

DEVICES = 4
PROJECTION = orthogonal_features(jax.random.key(0), 16, 8)


def linear(*qkv, **call):
  return linear_attention(*qkv, **call)


def linear_of_closure(*qkv, **call):
  def feature_map(x):
    return jax.nn.softplus(x @ PROJECTION.T)

  return linear_attention(*qkv, feature_map=feature_map, **call)


def performer(*qkv, **call):
  return performer_attention(*qkv, projection=PROJECTION, **call)


@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("attend", [linear, linear_of_closure, performer])
@pytest.mark.parametrize(
  ("axis", "batch", "heads", "kv_heads"),
  [("batch", 4, 2, 2), ("heads", 1, 8, 8), ("heads", 2, 8, 4)],
  ids=["batch", "heads", "key-heads"],
)
def test_no_gather(attend, is_causal, axis, batch, heads, kv_heads):
  rng = np.random.default_rng(0)
  length = 300
  qkv = [
    rng.standard_normal((batch, length, n, 8), np.float32)
    for n in (heads, kv_heads, kv_heads)
  ]
  mask = jnp.arange(length)[None, None, None] < 290

  @jax.jit
  def run(*qkv):
    out, pullback = jax.vjp(
      lambda *qkv: attend(*qkv, mask=mask, is_causal=is_causal), *qkv
    )
    return out, pullback(jnp.sin(out))

  mesh = jax.sharding.Mesh(
    jax.devices()[:DEVICES], (axis,), axis_types=(jax.sharding.AxisType.Auto,)
  )
  spec = jax.P(axis) if axis == "batch" else jax.P(None, None, axis)
  sharding = jax.sharding.NamedSharding(mesh, spec)
  sharded = jax.device_put(qkv, sharding)
  compiled = run.lower(*sharded).compile()
  assert "all-gather" not in compiled.as_text()
  assert "all-to-all" not in compiled.as_text()

  got = jax.tree.leaves(compiled(*sharded))
  for x, y in zip(got, jax.tree.leaves(run(*qkv)), strict=True):
    assert x.sharding.is_equivalent_to(sharding, 4)
    assert_close(x, y, 1e-5)
