"""Additive attention beside the contract suite: blocks, kernels, its laws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  additive,
  additive_attention,
  attention_weights,
  platform,
)
from attention.softmax import masked_softmax
from attention.testing import Case, assert_close
from tests.attention.forms import thorough

WIDTH = 6


@pytest.fixture
def short_blocks(monkeypatch):
  """Blocks of 4 queries and 5 keys, so that short sequences run over many."""
  monkeypatch.setattr(platform, "block", lambda *_: (4, 5))


def kernels(case, width=WIDTH):
  variables = additive(width).init(jax.random.key(0), case.dims)
  return variables["params"]


def draw(case):
  """Query, key, value and the call as arrays of JAX."""
  arrays, call = case.draw()
  call = {k: x if x is True else jnp.asarray(x) for k, x in call.items()}
  return [jnp.asarray(x) for x in arrays], call


def at_once(query, key, value, params, *, bias, allowed, kept=1.0):
  """The formula with all T·S·A numbers, for autodiff to differentiate."""
  query = jnp.einsum("BTNH,NHA->BNTA", query, params["query_kernel"])
  group = query.shape[1] // key.shape[2]
  key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
  key = jnp.einsum("BSNH,NHA->BNSA", key, params["key_kernel"])
  z = jnp.tanh(query[:, :, :, None] + key[:, :, None])
  scores = jnp.einsum("BNTSA,NA->BNTS", z, params["score_kernel"])
  weights = masked_softmax(scores + bias, allowed) * kept
  return jnp.einsum("BNTS,BSNV->BTNV", weights, value)


@pytest.mark.parametrize(
  ("case", "bias_shape", "mask_axes"),
  [
    (Case(("causal", "mask", "segments"), length=14), (1, 1, 1, 1), ()),
    (
      Case(("full_mask", "causal"), length=11, source_length=18, value_dim=3),
      (2, 4, 11, 18),
      (),
    ),
    (Case(("full_mask",), length=2, source_length=11), (2, 1, 2, 1), (0, 2)),
    *thorough(
      (
        Case(("full_mask",), length=9, source_length=3, num_kv_heads=1),
        (1, 4, 1, 3),
        (1, 3),
      )
    ),
  ],
)
@pytest.mark.usefixtures("short_blocks")
def test_blocks_equal_all_at_once(case, bias_shape, mask_axes):
  qkv, call = draw(case)
  params = kernels(case)
  keys = jax.random.split(jax.random.key(3))
  bias = jax.random.normal(keys[0], bias_shape)
  cotangent = jax.random.normal(keys[1], (*qkv[0].shape[:3], case.value_dim))
  for axis in mask_axes:
    call["mask"] = jax.lax.slice_in_dim(call["mask"], 0, 1, axis=axis)
  allowed = call["mask"]
  is_causal = call.pop("is_causal", False)
  if is_causal:
    allowed = allowed & jnp.tri(case.length, case.keys, dtype=bool)[None, None]
  if "query_segment_ids" in call:
    same = (
      call["query_segment_ids"][:, :, None]
      == call["key_segment_ids"][:, None, :]
    )
    allowed = allowed & same[:, None]

  @jax.jit
  def in_blocks(qkv, params, bias, call):
    def f(qkv, params, bias):
      options = {"bias": bias, "is_causal": is_causal, **call}
      return additive_attention(*qkv, **params, **options)

    out, vjp = jax.vjp(f, qkv, params, bias)
    return out, vjp(cotangent)

  @jax.jit
  def expected(qkv, params, bias):
    def f(qkv, params, bias):
      return at_once(*qkv, params, bias=bias, allowed=allowed)

    out, vjp = jax.vjp(f, qkv, params, bias)
    return out, vjp(cotangent)

  got = jax.tree.leaves(in_blocks(qkv, params, bias, call))
  wanted = jax.tree.leaves(expected(qkv, params, bias))
  norm = max(np.abs(x).max() for x in wanted)
  for a, b in zip(got, wanted, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * norm)


@pytest.mark.parametrize("is_causal", [False, *thorough((True,))])
def test_dropout_drops_weights(is_causal):
  """Each weight is 0 or 1/(1 - rate) of itself, and gradients agree on which."""
  rate, length = 0.25, 150
  case = Case(("bias",), length=length, batch=1)
  (query, key, value), call = draw(case)
  params, bias = kernels(case), call["bias"]
  exact = functools.partial(additive_attention, is_causal=is_causal)
  dropped = functools.partial(
    exact, dropout_rate=rate, dropout_rng=jax.random.key(3)
  )
  exact, weights = (
    np.asarray(
      jax.jit(functools.partial(attention_weights, f))(
        query, key, **params, bias=bias
      )
    )
    for f in (exact, dropped)
  )
  kept, seen = weights != 0, exact != 0
  assert not (kept & ~seen).any()
  np.testing.assert_allclose(weights[kept], exact[kept] / (1 - rate), rtol=2e-5)
  # A binomial count: 4 standard deviations.
  deviation = np.sqrt(rate * (1 - rate) / seen.sum())
  assert abs(kept.sum() / seen.sum() - (1 - rate)) < 4 * deviation
  if not is_causal:
    # Neither heads, rows nor blocks share their draws.
    blocks = kept[:, :, :144, :128].reshape(4, 9, 16, 2, 64)
    blocks = blocks.transpose(0, 1, 3, 2, 4).reshape(72, -1)
    assert len({block.tobytes() for block in blocks}) == 72

  cotangent = jax.random.normal(
    jax.random.key(1), (*query.shape[:3], case.value_dim)
  )

  @jax.jit
  def in_blocks(*args):
    def f(qkv, params, bias):
      return dropped(*qkv, **params, bias=bias)

    return jax.vjp(f, *args)[1](cotangent)

  @jax.jit
  def by_hand(*args):
    def f(qkv, params, bias):
      return at_once(
        *qkv,
        params,
        bias=bias,
        allowed=jnp.asarray(seen),
        kept=kept / (1 - rate),
      )

    return jax.vjp(f, *args)[1](cotangent)

  args = ((query, key, value), params, bias)
  got, expected = (jax.tree.leaves(f(*args)) for f in (in_blocks, by_hand))
  norm = max(np.abs(x).max() for x in expected)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * norm)


def test_without_curvature_the_query_does_not_matter():
  """tanh x ≈ x, and v·W q is the same for all keys of a query."""
  (query, key, value), _ = draw(Case(num_kv_heads=4))
  params = kernels(Case(num_kv_heads=4))
  params = {
    "query_kernel": params["query_kernel"] * 1e-3,
    "key_kernel": params["key_kernel"] * 1e-3,
    "score_kernel": params["score_kernel"] * 1e3,
  }
  out = additive_attention(query, key, value, **params)
  linear = jnp.einsum(
    "BSNH,NHA,NA->BNS", key, params["key_kernel"], params["score_kernel"]
  )
  weights = jax.nn.softmax(linear, axis=-1)
  expected = jnp.einsum("BNS,BSNV->BNV", weights, value)[:, None]
  assert_close(out, np.broadcast_to(expected, out.shape), 1e-4)


def test_the_scale_is_one_unless_given():
  case = Case()
  qkv, _ = draw(case)
  params = kernels(case)
  out = additive_attention(*qkv, **params)
  same = additive_attention(*qkv, **params, scale=1.0)
  np.testing.assert_array_equal(out, same)
  # A traced factor, and one that makes every key weigh the same.
  flat = jax.jit(functools.partial(additive_attention, **params))(
    *qkv, scale=jnp.float32(0.0)
  )
  mean = jnp.repeat(qkv[2].mean(1, keepdims=True), 2, axis=2)
  assert_close(flat, np.broadcast_to(mean, flat.shape), 1e-6)


@pytest.mark.parametrize("fill", [np.inf, np.nan])
def test_masked_keys_are_not_read_even_where_they_are_no_numbers(fill):
  case = Case(("mask",))
  qkv, call = draw(case)
  params = kernels(case)

  @jax.jit
  def run(qkv):
    out, vjp = jax.vjp(
      lambda *qkv: additive_attention(*qkv, **params, **call), *qkv
    )
    return out, vjp(jnp.ones_like(out))

  before = run(qkv)
  hidden = ~call["mask"][:, 0, 0, :]
  qkv[1:] = (x.at[hidden].set(fill) for x in qkv[1:])
  jax.tree.map(np.testing.assert_array_equal, run(qkv), before)


def test_nan_among_the_visible_is_not_hidden():
  case = Case(length=5)
  (query, key, value), _ = draw(case)
  params = kernels(case)
  key = key.at[0, 2].set(jnp.nan)
  out = np.asarray(additive_attention(query, key, value, **params))
  assert np.isnan(out[0]).all()
  assert np.isfinite(out[1]).all()


def test_kernels_must_fit(unchecked):
  case = Case()
  qkv, _ = draw(case)
  params = kernels(case)
  for name, wrong in (
    ("query_kernel", params["query_kernel"][:2]),
    ("key_kernel", params["key_kernel"][..., :3]),
    ("key_kernel", params["key_kernel"][:, :3]),
    ("score_kernel", params["score_kernel"][:, :3]),
  ):
    with pytest.raises(ValueError, match=f"^{name}: expected .+ got"):
      additive_attention(*qkv, **{**params, name: wrong})


def test_the_factory():
  with pytest.raises(
    ValueError, match=r"^width: expected an int of at least 1"
  ):
    additive(0)
  params = kernels(Case(head_dim=16, num_heads=64), width=32)
  assert params["query_kernel"].shape == (64, 16, 32)
  assert params["key_kernel"].shape == (64, 16, 32)
  assert params["score_kernel"].shape == (64, 32)
  for name, fan_in in (("query_kernel", 16), ("score_kernel", 32)):
    assert float(params[name].std()) * fan_in**0.5 == pytest.approx(1, abs=0.05)
