"""What only dense attention has: bias as mask, dropout, jax.nn's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import attention_weights, dense_attention, platform, rows
from attention.testing import Case, assert_close


def qkv(**shape):
  return [jnp.asarray(x) for x in Case(**shape).draw()[0]]


def test_equals_jax_nn():
  query, key, value = qkv()
  bias = jnp.asarray(Case(("bias",)).draw()[1]["bias"])
  mask = jnp.tri(13, k=3, dtype=bool)[None, None]
  expected = jax.nn.dot_product_attention(
    query, key, value, bias=bias, mask=mask, is_causal=True, scale=0.3
  )
  got = dense_attention(
    query, key, value, bias=bias, mask=mask, is_causal=True, scale=0.3
  )
  assert_close(got, expected, 1e-6)


def test_a_bias_of_minus_infinity_is_a_mask():
  query, key, value = qkv()
  mask = (
    jnp.asarray(Case(("full_mask",)).draw()[1]["mask"]).at[0, 0, 2].set(False)
  )
  bias = jnp.where(mask, 0.0, -jnp.inf)

  def loss(query, **options):
    out = dense_attention(query, key, value, **options)
    return (out**2).sum(), out

  (_, got), gradient = jax.value_and_grad(loss, has_aux=True)(query, bias=bias)
  (_, expected), _ = jax.value_and_grad(loss, has_aux=True)(query, mask=mask)
  assert not got[0, 2, 0].any()
  assert_close(got, expected, 1e-6)
  assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_nan_is_not_hidden(is_causal):
  """Training stops at what is not finite, so it has to come through."""
  for i in range(3):
    arrays = qkv()
    arrays[i] = arrays[i].at[1, 5].set(jnp.nan)
    out = dense_attention(*arrays, is_causal=is_causal)
    assert jnp.isnan(out[1, 5]).all()
    assert jnp.isfinite(out[0]).all()


def test_dropout_drops_a_share_of_the_weights_and_rescales_the_others():
  query, key, _ = qkv(batch=8)
  weights = attention_weights(dense_attention, query, key)
  dropped = attention_weights(
    dense_attention,
    query,
    key,
    dropout_rate=0.25,
    dropout_rng=jax.random.key(0),
  )
  kept = dropped != 0
  # 8·4·13·13 weights: four standard deviations are 0.024.
  assert abs(kept.mean() - 0.75) < 0.024
  assert_close(dropped[kept], weights[kept] / 0.75, 1e-6)
  # Each example, head and query draws its own.
  rows = np.asarray(kept).reshape(-1, 13)
  assert len(np.unique(rows, axis=0)) > 300


def test_dropout_is_a_function_of_its_key():
  arrays = qkv()
  drop = functools.partial(dense_attention, *arrays, dropout_rate=0.5)
  first, again, other = (
    drop(dropout_rng=jax.random.key(seed)) for seed in (0, 0, 1)
  )
  assert (first == again).all()
  assert (first != other).any()
  mean = jax.vmap(lambda key: drop(dropout_rng=key))(
    jax.random.split(jax.random.key(2), 1024)
  ).mean(axis=0)
  assert_close(mean, dense_attention(*arrays), 0.1)


def test_dropout_needs_a_key_and_a_rate():
  arrays = qkv()
  assert (
    dense_attention(*arrays, dropout_rng=jax.random.key(0))
    == dense_attention(*arrays)
  ).all()
  with pytest.raises(ValueError, match=r"^dropout_rng: expected a key"):
    dense_attention(*arrays, dropout_rate=0.1)
  for rate in (-0.1, 1.0, float("nan")):
    with pytest.raises(ValueError, match=r"^dropout_rate: expected \[0, 1\)"):
      dense_attention(*arrays, dropout_rate=rate)


def test_a_wrong_bias_raises():
  with pytest.raises(ValueError, match=r"^bias: .*\[2, 4, 13, 13\]"):
    dense_attention(*qkv(), bias=jnp.zeros((2, 3, 13, 13)))


OPTIONS = [
  {},
  {"is_causal": True},
  {"mask": "full"},
  {"mask": "key", "bias": "full"},
  {"bias": "head", "is_causal": True},
  {"segments": True, "mask": "query"},
  {"relative": True},
]


def drawn(chosen, length=13, source_length=11):
  """Options as arrays; a row of the full mask sees nothing."""
  rng = np.random.default_rng(0)
  masks = {
    "full": rng.random((2, 4, length, source_length)) < 0.6,
    "key": rng.random((2, 1, 1, source_length)) < 0.6,
    "query": rng.random((2, 1, length, 1)) < 0.6,
  }
  masks["full"][:, :, 3] = False
  biases = {
    "full": rng.normal(size=(1, 4, length, source_length)),
    "head": rng.normal(size=(1, 4, 1, source_length)),
  }
  fixed, trained = {}, {}
  for name, value in chosen.items():
    if name == "mask":
      fixed[name] = jnp.asarray(masks[value])
    elif name == "bias":
      trained[name] = jnp.asarray(biases[value], jnp.float32)
    elif name == "segments":
      fixed["query_segment_ids"] = jnp.arange(length)[None] // jnp.array(
        [[5], [7]]
      )
      fixed["key_segment_ids"] = jnp.arange(source_length)[None] // jnp.array(
        [[5], [7]]
      )
    elif name == "relative":
      trained["relative_bias"] = jnp.asarray(
        rng.normal(size=(4, 9)), jnp.float32
      )
      trained["relative_keys"] = jnp.asarray(
        rng.normal(size=(7, 8)), jnp.float32
      )
    else:
      fixed[name] = value
  return fixed, trained


@pytest.mark.parametrize("chosen", OPTIONS, ids=lambda x: "-".join(x) or "none")
def test_blocks_of_rows_change_no_value_and_no_gradient(monkeypatch, chosen):
  fixed, trained = drawn(chosen)
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (2, 13, 4, 8), (2, 11, 2, 8), (2, 11, 2, 5), (2, 13, 4, 5)
  *arrays, cotangent = (
    jax.random.normal(key, shape)
    for key, shape in zip(keys, shapes, strict=True)
  )

  def both():
    def attend(arrays, trained):
      return dense_attention(*arrays, **trained, **fixed)

    # Compiled anew for each setting of the platform.
    @jax.jit
    def pulled(arrays, trained):
      out, pullback = jax.vjp(attend, arrays, trained)
      return out, pullback(cotangent)

    return pulled(tuple(arrays), trained)

  expected = both()
  monkeypatch.setattr(rows, "WHOLE", 6)
  monkeypatch.setattr(platform, "rows_at_once", lambda *_, **__: 4)
  jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), both(), expected)


def test_blocks_of_rows_keep_dropout_and_higher_derivatives(monkeypatch):
  """Each block has a draw of its own, and the backward draws it again."""
  query, key, value = qkv()

  def attend(query, **options):
    return dense_attention(query, key, value, **options)

  def curvature():
    def slope(query):
      return jax.grad(lambda x: (attend(x) ** 2).sum())(query)

    forward = jax.jvp(slope, (query,), (jnp.ones_like(query),))[1]
    reverse = jax.grad(lambda x: (slope(x) ** 2).sum())(query)
    return forward, reverse

  expected = curvature()
  monkeypatch.setattr(rows, "WHOLE", 6)
  monkeypatch.setattr(platform, "rows_at_once", lambda *_, **__: 4)
  for got, wanted in zip(curvature(), expected, strict=True):
    assert_close(got, wanted, 1e-5)

  same = jnp.ones_like(query)
  dropped = dense_attention(
    same,
    jnp.ones_like(key),
    jnp.broadcast_to(jnp.eye(13)[None, :, None], (2, 13, key.shape[2], 13)),
    dropout_rate=0.5,
    dropout_rng=jax.random.key(0),
  )
  kept = dropped > 0.0
  assert 0.4 < float(kept.mean()) < 0.6
  assert not (kept[:, :4] == kept[:, 4:8]).all()

  rng = jax.random.key(1)
  drop = functools.partial(attend, dropout_rate=0.5, dropout_rng=rng)
  tangent = jax.random.normal(rng, query.shape)
  slope = jax.grad(lambda x: drop(x).sum())(query)
  step = 1e-2
  ahead, behind = (drop(query + s * tangent).sum() for s in (step, -step))
  np.testing.assert_allclose(
    (slope * tangent).sum(), (ahead - behind) / (2 * step), rtol=2e-2
  )
