"""Additive attention beside the contract suite: blocks, kernels, its laws."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import additive, additive_attention, attention_weights
from attention.platform import backend
from attention.softmax.rows import masked_softmax
from attention.testing import Case, assert_close
from tests.attention.calls import assert_refused, normal, pulled

WIDTH = 6


@pytest.fixture
def short_blocks(monkeypatch):
  """Blocks of 4 queries and 5 keys, so that short sequences run over many."""
  monkeypatch.setattr(backend, "block", lambda *_: (4, 5))


@functools.cache
def kernels(dims, width=WIDTH):
  init = jax.jit(lambda key: additive(width).init(key, dims))
  return init(jax.random.key(0))["params"]


def draw(case):
  """Query, key, value, parameters and the call."""
  arrays, call = case.draw()
  call = {k: x if x is True else jnp.asarray(x) for k, x in call.items()}
  return [jnp.asarray(x) for x in arrays], kernels(case.dims), call


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


def assert_same(got, expected):
  """Each number beside the largest of all."""
  got, expected = map(jax.tree.leaves, (got, expected))
  norm = max(np.abs(x).max() for x in expected)
  for a, b in zip(got, expected, strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * norm)


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
  ],
)
@pytest.mark.usefixtures("short_blocks")
def test_blocks_equal_all_at_once(case, bias_shape, mask_axes):
  qkv, params, call = draw(case)
  (bias,) = normal(bias_shape, seed=3)
  mask = np.asarray(call["mask"])
  for axis in mask_axes:
    mask = mask.take([0], axis=axis)
  call["mask"] = jnp.asarray(mask)
  is_causal = call.pop("is_causal", False)
  allowed = mask & (
    not is_causal or np.tri(case.length, case.keys, dtype=bool)[None, None]
  )
  if "query_segment_ids" in call:
    ids = [np.asarray(call[f"{x}_segment_ids"]) for x in ("query", "key")]
    allowed = allowed & (ids[0][:, :, None] == ids[1][:, None])[:, None]

  def in_blocks(qkv, params, bias):
    options = {"bias": bias, "is_causal": is_causal, **call}
    return additive_attention(*qkv, **params, **options)

  def expected(qkv, params, bias):
    return at_once(*qkv, params, bias=bias, allowed=jnp.asarray(allowed))

  arguments = qkv, params, bias
  assert_same(pulled(in_blocks, *arguments), pulled(expected, *arguments))


def test_dropout_drops_weights():
  """Each weight is 0 or 1/(1 - rate) of itself, and gradients agree on which."""
  rate, length = 0.25, 150
  qkv, params, call = draw(Case(("bias",), length=length, batch=1))
  bias = call["bias"]
  dropout = {"dropout_rate": rate, "dropout_rng": jax.random.key(3)}
  exact, weights = (
    np.asarray(
      jax.jit(
        functools.partial(
          attention_weights, additive_attention, **params, bias=bias, **more
        )
      )(*qkv[:2])
    )
    for more in ({}, dropout)
  )
  kept = weights != 0
  np.testing.assert_allclose(weights[kept], exact[kept] / (1 - rate), rtol=2e-5)
  # A binomial count: 4 standard deviations.
  deviation = np.sqrt(rate * (1 - rate) / kept.size)
  assert abs(kept.mean() - (1 - rate)) < 4 * deviation
  # Neither heads, rows nor blocks share their draws.
  blocks = kept[:, :, :144, :128].reshape(4, 9, 16, 2, 64)
  blocks = blocks.transpose(0, 1, 3, 2, 4).reshape(72, -1)
  assert len({block.tobytes() for block in blocks}) == 72

  def in_blocks(qkv, params, bias):
    return additive_attention(*qkv, **params, bias=bias, **dropout)

  def by_hand(qkv, params, bias):
    options = {"bias": bias, "kept": kept / np.float32(1 - rate)}
    allowed = jnp.ones((1, 1, length, length), bool)
    return at_once(*qkv, params, allowed=allowed, **options)

  arguments = qkv, params, bias
  assert_same(pulled(in_blocks, *arguments), pulled(by_hand, *arguments))


def test_without_curvature_the_query_does_not_matter():
  """tanh x ≈ x, and v·W q is the same for all keys of a query."""
  (query, key, value), params, _ = draw(Case(num_kv_heads=4))
  factors = {"query_kernel": 1e-3, "key_kernel": 1e-3, "score_kernel": 1e3}
  params = {
    n: np.asarray(x) * np.float32(factors[n]) for n, x in params.items()
  }
  out = jax.jit(functools.partial(additive_attention, **params))(
    query, key, value
  )
  logits = np.einsum(
    "BSNH,NHA,NA->BNS", key, params["key_kernel"], params["score_kernel"]
  )
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  expected = np.einsum("BNS,BSNV->BNV", weights, value)[:, None]
  assert_close(out, np.broadcast_to(expected, out.shape), 1e-4)


def test_the_scale_is_one_unless_given():
  qkv, params, _ = draw(Case())
  attend = jax.jit(functools.partial(additive_attention, **params))
  np.testing.assert_array_equal(attend(*qkv), attend(*qkv, scale=1.0))
  # A traced factor that makes every key weigh the same.
  flat = attend(*qkv, scale=jnp.float32(0.0))
  mean = np.repeat(np.mean(qkv[2], axis=1, keepdims=True), 2, axis=2)
  assert_close(flat, np.broadcast_to(mean, flat.shape), 1e-6)


def test_masked_keys_are_not_read_even_where_they_are_no_numbers():
  """And NaN among the visible is not hidden."""
  qkv, params, call = draw(Case(("mask",)))

  @jax.jit
  def run(*qkv):
    attend = functools.partial(additive_attention, **params, **call)
    out, vjp = jax.vjp(attend, *qkv)
    return out, vjp(jnp.ones_like(out))

  before = run(*qkv)
  hidden = ~np.asarray(call["mask"])[:, 0, 0]
  for fill in (np.inf, np.nan):
    filled = [np.array(x) for x in qkv]
    for x in filled[1:]:
      x[hidden] = fill
    chex.assert_trees_all_equal(run(*filled), before)
  key = np.array(qkv[1])
  key[0, np.flatnonzero(~hidden[0])[0]] = np.nan
  out, _ = run(qkv[0], key, qkv[2])
  assert np.isnan(out[0]).all()
  assert np.isfinite(out[1]).all()


def test_what_does_not_fit_is_refused(unchecked):
  qkv, params, _ = draw(Case())
  assert_refused(
    lambda **change: additive_attention(*qkv, **params | change),
    [
      (f"{name}: expected .+ got", {name: wrong})
      for name, wrong in (
        ("query_kernel", params["query_kernel"][:2]),
        ("key_kernel", params["key_kernel"][..., :3]),
        ("key_kernel", params["key_kernel"][:, :3]),
        ("score_kernel", params["score_kernel"][:, :3]),
      )
    ],
  )
  assert_refused(
    additive, [("width: expected an int of at least", {"width": 0})]
  )


def test_the_factory_draws_kernels():
  params = kernels(Case(head_dim=16, num_heads=64).dims, width=32)
  for name, shape, fan_in in (
    ("query_kernel", (64, 16, 32), 16),
    ("key_kernel", (64, 16, 32), 16),
    ("score_kernel", (64, 32), 32),
  ):
    assert params[name].shape == shape
    deviation = np.std(params[name]) * fan_in**0.5
    assert deviation == pytest.approx(1, abs=0.05)
