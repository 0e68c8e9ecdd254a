"""Flash attention: exact at any block size, its dropout, its backends."""

import functools
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  attention_weights,
  definitions,
  dense_attention,
  flash_attention,
)
from attention.flash import flash
from attention.testing import Case, assert_close
from tests.attention.forms import thorough


def _thorough(*values):
  """Values of a parameter that the default suite leaves out."""
  return [pytest.param(x, marks=pytest.mark.thorough) for x in values]


@functools.partial(jax.jit, static_argnames=("is_causal", "block_size"))
def with_gradients(qkv, mask, cotangent, *, is_causal, block_size):
  """Output and gradients; `block_size` None is dense attention."""

  def call(*qkv):
    options = {"mask": mask, "is_causal": is_causal}
    if block_size is None:
      return dense_attention(*qkv, **options)
    return flash_attention(*qkv, block_size=block_size, **options)

  out, pullback = jax.vjp(call, *qkv)
  return out, *pullback(cotangent)


@pytest.mark.parametrize(
  ("length", "is_causal"),
  [
    (1, True),
    (1000, True),
    *thorough((128, True), (1000, False)),
  ],
)
def test_flash_is_dense(length, is_causal):
  case = Case(("mask",), length=length, batch=1, num_kv_heads=2)
  qkv, options = case.draw()
  cotangent = np.random.default_rng(1).standard_normal(qkv[0].shape, np.float32)
  # Every step of causality, of the ragged end and of a key mask.
  for mask in (None, options["mask"]):
    got, expected = (
      with_gradients(
        qkv, mask, cotangent, is_causal=is_causal, block_size=block_size
      )
      for block_size in ((512, 256), None)
    )
    for ours, theirs in zip(got, expected, strict=True):
      np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("block_size", [(3, 8), *_thorough(1, 5, (13, 2), 64)])
def test_any_block_size(block_size):
  qkv, options = Case(("full_mask",)).draw()
  cotangent = np.ones_like(qkv[0])
  got, expected = (
    with_gradients(
      qkv, options["mask"], cotangent, is_causal=True, block_size=size
    )
    for size in (block_size, None)
  )
  for ours, theirs in zip(got, expected, strict=True):
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_length_just_beyond_a_block(is_causal):
  """513 positions are two blocks of 272, the second of which moves back."""
  qkv, options = Case(("mask",), length=513, batch=1, num_kv_heads=2).draw()
  mask = jnp.asarray(options["mask"])
  cotangent = np.random.default_rng(1).standard_normal(qkv[0].shape, np.float32)

  @functools.partial(jax.jit, static_argnums=0)
  def found(function, qkv, cotangent):
    attend = functools.partial(function, is_causal=is_causal, mask=mask)
    out, pullback = jax.vjp(attend, *qkv)
    return out, *pullback(cotangent)

  got, expected = (
    found(function, qkv, cotangent)
    for function in (flash_attention, dense_attention)
  )
  for ours, theirs in zip(got, expected, strict=True):
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_traced_scale():
  qkv = [jnp.asarray(x) for x in Case().draw()[0]]
  got = jax.jit(lambda scale: flash_attention(*qkv, scale=scale))(0.2)
  assert_close(got, flash_attention(*qkv, scale=0.2), 1e-6)


def test_dropout_drops_weights_of_dense_attention():
  """Each weight is 0 or 1/(1 - rate) of dense's, and gradients agree on which."""
  rate, length = 0.25, 150
  query, key, value = map(
    jnp.asarray, Case(length=length, batch=1, num_kv_heads=4).draw()[0]
  )
  call = functools.partial(
    flash_attention,
    dropout_rate=rate,
    dropout_rng=jax.random.key(3),
    block_size=(64, 32),
  )
  weights = np.asarray(
    jax.jit(functools.partial(attention_weights, call))(query, key)
  )
  exact = np.asarray(attention_weights(dense_attention, query, key))
  kept = weights != 0
  np.testing.assert_allclose(weights[kept], exact[kept] / (1 - rate), rtol=2e-5)
  # A binomial count of 90,000 weights: 4 standard deviations are 0.6 %.
  assert abs(kept.mean() - (1 - rate)) < 0.006
  # Neither heads, rows nor blocks share their draws.
  blocks = (
    kept[:, :, :128, :128].reshape(4, 2, 64, 4, 32).transpose(0, 1, 3, 2, 4)
  )
  assert len({block.tobytes() for block in blocks.reshape(32, -1)}) == 32

  def by_hand(query, key, value):
    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key) / np.sqrt(8)
    weights = jax.nn.softmax(logits) * kept / (1 - rate)
    return jnp.einsum("BNTS,BSNV->BTNV", weights, value)

  cotangent = jax.random.normal(jax.random.key(1), value.shape)
  for got, expected in zip(
    jax.jit(lambda *qkv: jax.vjp(call, *qkv)[1](cotangent))(query, key, value),
    jax.vjp(by_hand, query, key, value)[1](cotangent),
    strict=True,
  ):
    assert_close(got, expected, 1e-5)


@pytest.mark.parametrize(
  ("implementation", "message"),
  [
    ("cudnn", "'cudnn' needs a GPU, got cpu; use 'xla' or None"),
    ("tokamax", "'tokamax' needs a GPU, got cpu; use 'xla' or None"),
    ("triton", "expected None or one of xla, cudnn, tokamax, got 'triton'"),
  ],
)
def test_an_implementation_that_cannot_serve_raises(
  implementation, message, unchecked
):
  qkv, _ = Case().draw()
  with pytest.raises(ValueError, match=f"^implementation: {message}"):
    flash_attention(*qkv, implementation=implementation)


def on_a_gpu(monkeypatch):
  """Makes the choice as on a GPU; calls are recorded, not made."""
  calls = []

  def kernel(query, key, value, **options):
    calls.append(options)
    # The kernels average all values where a query sees nothing.
    return dense_attention(query, key, value, scale=options["scale"])

  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  tokamax = types.SimpleNamespace(dot_product_attention=kernel)
  monkeypatch.setitem(sys.modules, "tokamax", tokamax)
  return calls


def test_cudnn_is_the_choice_on_a_gpu(monkeypatch):
  calls = on_a_gpu(monkeypatch)
  qkv = [jnp.asarray(x, jnp.bfloat16) for x in Case().draw()[0]]
  mask = np.ones((2, 1, 1, 13), bool)
  mask[0, ..., :2], mask[1] = False, False
  out = flash_attention(*qkv, mask=jnp.asarray(mask), is_causal=True)
  assert len(calls) == 1
  assert calls[0]["implementation"] == "cudnn"
  assert calls[0]["is_causal"]
  # Queries 0 and 1 of the first example and all of the second see nothing.
  rows = np.asarray(out, np.float32).any(axis=(2, 3))
  np.testing.assert_array_equal(rows[0], np.arange(13) >= 2)
  assert not rows[1].any()


def test_tokamax_when_it_is_asked_for(monkeypatch):
  calls = on_a_gpu(monkeypatch)
  qkv = [jnp.asarray(x, jnp.bfloat16) for x in Case(value_dim=5).draw()[0]]
  out = flash_attention(*qkv, scale=0.2, implementation="tokamax")
  # Exactly the names of tokamax 0.0.12; no `implementation`: it chooses.
  assert calls == [
    {"scale": 0.2, "mask": None, "bias": None, "is_causal": False}
  ]
  assert_close(out, dense_attention(*qkv, scale=0.2), 1e-6)


@pytest.mark.parametrize(
  ("dtype", "options", "reason"),
  [
    ("float32", (), "takes float16 and bfloat16, got float32"),
    ("bfloat16", ("segments",), "cannot take query_segment_ids"),
    ("bfloat16", ("relative_bias",), "cannot take relative_bias"),
  ],
)
def test_what_cudnn_cannot_serve_is_xlas(monkeypatch, dtype, options, reason):
  calls = on_a_gpu(monkeypatch)
  qkv, call = Case(options).draw()
  qkv = [jnp.asarray(x, dtype) for x in qkv]
  call = jax.tree.map(jnp.asarray, call)
  assert_close(
    flash_attention(*qkv, **call),
    dense_attention(*qkv, **call),
    1e-6 if dtype == "float32" else 2e-2,
  )
  assert not calls
  with pytest.raises(ValueError, match=f"^implementation: 'cudnn' {reason}"):
    flash_attention(*qkv, implementation="cudnn", **call)


@pytest.mark.parametrize("block_size", [0, (4,), (4, -1), True, 2.0])
def test_a_wrong_block_size_raises(block_size, unchecked):
  with pytest.raises(ValueError, match=r"^block_size: expected a positive"):
    flash(block_size=block_size)


def test_forgetting_keeps_its_digits_over_a_long_sequence():
  """Σ log f is −1,200 at the end, where a float32 has steps of 1e-4."""
  rng = np.random.default_rng(0)
  shape = (1, 1200, 2, 8)
  qkv = [rng.normal(size=shape).astype(np.float32) for _ in range(3)]
  log_forget = -rng.exponential(1.0, size=shape[:3]).astype(np.float32)
  call = {"is_causal": True, "log_forget": jnp.asarray(log_forget)}
  expected = definitions.flash_attention(*qkv, **call)
  for function in (flash_attention, dense_attention):
    out = function(*map(jnp.asarray, qkv), **call)
    assert_close(out, expected, 2e-6)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"sinks": jnp.zeros(3)}, r"^sinks: expected \[2\] for \[N\]"),
    ({"logits_soft_cap": 0.0}, r"^logits_soft_cap: .* above 0, got 0.0"),
    ({"logits_soft_cap": jnp.ones(())}, r"^logits_soft_cap: .* a finite numb"),
    ({"log_forget": jnp.zeros((1, 4, 2))}, r"^log_forget: .*is_causal=True"),
    (
      {"log_forget": jnp.zeros((1, 3, 2)), "is_causal": True},
      r"^log_forget: expected \[1, 4, 2\] for",
    ),
  ],
)
def test_what_does_not_fit_the_logits_raises(unchecked, options, message):
  x = jnp.zeros((1, 4, 2, 8))
  for function in (flash_attention, dense_attention):
    with pytest.raises(ValueError, match=message):
      function(x, x, x, **options)
