"""What only dense attention has: bias as mask, dropout, jax.nn's numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  attention_weights,
  dense_attention,
  differential_attention,
  flash_attention,
  latent_attention,
  multiplicative_attention,
)
from attention.logits import Logits
from attention.testing import Case, assert_close
from attention.visible import causal, key_mask, mask_mod, pair_mask, window


def qkv(**shape):
  return [jnp.asarray(x) for x in Case(**shape).draw()[0]]


def test_equals_jax_nn():
  query, key, value = qkv()
  bias = jnp.asarray(Case(("bias",)).draw()[1]["bias"])
  mask = jnp.tri(13, k=3, dtype=bool)[None, None]
  call = {"bias": bias, "mask": mask, "is_causal": True, "scale": 0.3}
  got, expected = (
    jax.jit(functools.partial(f, **call))(query, key, value)
    for f in (dense_attention, jax.nn.dot_product_attention)
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
  rng = jax.random.key(0)
  weights, dropped = (
    jax.jit(functools.partial(attention_weights, dense_attention, **call))(
      query, key
    )
    for call in ({}, {"dropout_rate": 0.25, "dropout_rng": rng})
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
  drop = jax.jit(functools.partial(dense_attention, *arrays, dropout_rate=0.5))
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
def test_blocks_of_rows_change_no_value_and_no_gradient(chosen):
  fixed, trained = drawn(chosen)
  keys = jax.random.split(jax.random.key(0), 4)
  shapes = (2, 13, 4, 8), (2, 11, 2, 8), (2, 11, 2, 5), (2, 13, 4, 5)
  *arrays, cotangent = (
    jax.random.normal(key, shape)
    for key, shape in zip(keys, shapes, strict=True)
  )

  def both(block_size):
    def attend(arrays, trained):
      return dense_attention(
        *arrays, **trained, **fixed, block_size=block_size, return_lse=True
      )

    @jax.jit
    def pulled(arrays, trained):
      (out, lse), pullback = jax.vjp(attend, arrays, trained)
      return out, jnp.exp(lse), pullback((cotangent, cotangent[..., 0]))

    return pulled(tuple(arrays), trained)

  jax.tree.map(lambda x, y: assert_close(x, y, 1e-6), both(4), both(None))


def test_blocks_of_rows_keep_dropout_and_higher_derivatives():
  """Each block has a draw of its own, and the backward draws it again."""
  query, key, value = qkv()

  def attend(query, block_size=4, **options):
    return dense_attention(query, key, value, block_size=block_size, **options)

  @functools.partial(jax.jit, static_argnums=1)
  def curvature(query, block_size):
    def slope(query):
      return jax.grad(lambda x: (attend(x, block_size) ** 2).sum())(query)

    forward = jax.jvp(slope, (query,), (jnp.ones_like(query),))[1]
    reverse = jax.grad(lambda x: (slope(x) ** 2).sum())(query)
    return forward, reverse

  curvatures = curvature(query, 4), curvature(query, None)
  for got, wanted in zip(*curvatures, strict=True):
    assert_close(got, wanted, 1e-5)

  same = jnp.ones_like(query)
  dropped = dense_attention(
    same,
    jnp.ones_like(key),
    jnp.broadcast_to(jnp.eye(13)[None, :, None], (2, 13, key.shape[2], 13)),
    dropout_rate=0.5,
    dropout_rng=jax.random.key(0),
    block_size=4,
  )
  kept = dropped > 0.0
  assert 0.4 < float(kept.mean()) < 0.6
  assert not (kept[:, :4] == kept[:, 4:8]).all()

  rng = jax.random.key(1)

  @jax.jit
  @jax.value_and_grad
  def drop(query):
    return attend(query, dropout_rate=0.5, dropout_rng=rng).sum()

  tangent = jax.random.normal(rng, query.shape)
  _, slope = drop(query)
  step = 1e-2
  ahead, behind = (drop(query + s * tangent)[0] for s in (step, -step))
  np.testing.assert_allclose(
    (slope * tangent).sum(), (ahead - behind) / (2 * step), rtol=2e-2
  )


@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_log_sum_exp_and_its_gradient_are_those_of_flash(with_sinks):
  """Also of a row that sees nothing."""
  query, key, value = qkv()
  mask = jnp.asarray(Case(("full_mask",)).draw()[1]["mask"])
  mask = mask.at[0, 0, 2].set(False)
  sinks = jnp.arange(4.0) - 2 if with_sinks else None

  def loss(query, attend):
    out, lse = attend(
      query, key, value, mask=mask, sinks=sinks, return_lse=True
    )
    return jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0) ** 2), (out, lse)

  got, expected = (
    jax.jit(jax.value_and_grad(lambda x, f=f: loss(x, f), has_aux=True))(query)
    for f in (dense_attention, flash_attention)
  )
  assert got[0][1][1].dtype == jnp.float32
  assert with_sinks or got[0][1][1][0, 2, 0] == -jnp.inf
  for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-5)


def test_third_derivatives_of_the_log_sum_exp_agree():
  query, key, value = qkv()

  def loss(x):
    return jnp.sum(
      dense_attention(x, key, value, block_size=4, return_lse=True)[1] ** 2
    )

  def along(function):
    return lambda x: jax.jvp(function, (x,), (query,))[1]

  forward = jax.jit(along(along(along(loss))))(query)
  reverse = jnp.sum(jax.jit(jax.grad(along(along(loss))))(query) * query)
  np.testing.assert_allclose(forward, reverse, rtol=1e-4)


def test_visible_and_logits_say_what_options_say():
  query, key, value = qkv()
  cap, keep = 3.0, jnp.arange(26).reshape(2, 13) % 5 > 0
  got = dense_attention(
    query,
    key,
    value,
    visible=causal() & window(4, None) & key_mask(keep),
    logits=Logits(scale=0.3, soft_cap=cap),
  )
  near = jnp.tri(13, k=0, dtype=bool) & ~jnp.tri(13, k=-5, dtype=bool)
  expected = dense_attention(
    query,
    key,
    value,
    mask=near[None, None] & keep[:, None, None],
    scale=0.3,
    logits_soft_cap=cap,
  )
  assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("name", ["differential", "latent", "multiplicative"])
def test_mechanisms_made_of_it_return_their_log_sum_exp(name):
  """What one Visible says, a mask says too, and the sums are those of dense."""
  query, key, value = qkv()
  mask = jnp.asarray(Case(("full_mask",)).draw()[1]["mask"])

  def of_head(b, n, t, s):
    del b
    return s <= t + n

  n, t, s = jnp.ogrid[:4, :13, :13]
  whole = mask & (s <= t + n)[None]
  if name == "differential":
    call = functools.partial(
      differential_attention, query, key, value, weight=1.0
    )
    halves = [
      (q, k, value)
      for q, k in zip(*(jnp.split(x, 2, 3) for x in (query, key)), strict=True)
    ]
  elif name == "latent":
    kernel = jnp.broadcast_to(jnp.eye(8)[:, None], (8, 4, 8))
    kernels = {"key_kernel": kernel, "value_kernel": kernel}
    call = functools.partial(latent_attention, query, key[:, :, 0], **kernels)
    one = key[:, :, :1]
    halves = [(query, one, one)]
  else:
    call = functools.partial(
      multiplicative_attention, query, key, value, scale=8**-0.5
    )
    halves = [(query, key, value)]
  out, lse = call(visible=pair_mask(mask) & mask_mod(of_head), return_lse=True)
  assert_close(out, call(mask=whole), 1e-6)
  lses = lse if isinstance(lse, tuple) else (lse,)
  for got, arrays in zip(lses, halves, strict=True):
    expected = dense_attention(*arrays, mask=whole, return_lse=True)[1]
    np.testing.assert_allclose(got, expected, atol=1e-5)
