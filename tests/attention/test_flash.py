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
  ATTENTIONS,
  Dims,
  definitions,
  dense_attention,
  flash_attention,
)
from attention.flash import flash
from attention.testing import Case, assert_close
from tests.attention.calls import assert_refused, draw, normal
from tests.attention.window_cases import check_dropout


@functools.partial(jax.jit, static_argnames=("is_causal", "block_size"))
def with_gradients(qkv, mask, *, is_causal, block_size):
  """Output and gradients; `block_size` 0 is dense attention."""

  def call(*qkv):
    options = {"mask": mask, "is_causal": is_causal}
    if block_size == 0:
      return dense_attention(*qkv, **options)
    return flash_attention(*qkv, block_size=block_size, **options)

  out, pullback = jax.vjp(call, *qkv)
  return out, *pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape))


# 513 positions are two blocks of 272, the second of which moves back.
@pytest.mark.parametrize(
  ("length", "is_causal", "option", "block_size"),
  [
    (1, True, "mask", (512, 256)),
    (1000, True, "mask", (512, 256)),
    (513, False, "mask", None),
    (513, True, "mask", None),
    (13, True, "full_mask", (3, 8)),
  ],
)
def test_flash_is_dense(length, is_causal, option, block_size):
  case = Case((option,), length=length, batch=1, num_kv_heads=2)
  qkv, options = case.draw()
  # Every step of causality, of the ragged end and of a mask.
  for mask in (np.ones_like(options["mask"]), options["mask"]):
    got, expected = (
      with_gradients(qkv, mask, is_causal=is_causal, block_size=x)
      for x in (block_size, 0)
    )
    for ours, theirs in zip(got, expected, strict=True):
      np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_a_traced_scale():
  qkv = draw(13)
  got = jax.jit(lambda scale: flash_attention(*qkv, scale=scale))(0.2)
  assert_close(got, definitions.dense_attention(*qkv, scale=0.2), 1e-6)


def test_dropout_drops_weights_of_dense_attention():
  """Each weight is 0 or 1/(1 - rate) of dense's, and gradients agree on which."""
  qkv, (cotangent,) = draw(150, batch=1), normal((1, 150, 4, 8), seed=1)
  attend = functools.partial(flash_attention, block_size=(64, 32))
  kept = check_dropout(attend, qkv, cotangent)
  # Neither heads, rows nor blocks share their draws.
  blocks = (
    kept[:, :, :128, :128].reshape(4, 2, 64, 4, 32).transpose(0, 1, 3, 2, 4)
  )
  assert len({block.tobytes() for block in blocks.reshape(32, -1)}) == 32


def test_what_does_not_fit_is_refused(unchecked):
  """The logits of dense attention as well."""
  x = jnp.zeros((1, 4, 2, 8))
  attend = functools.partial(flash_attention, x, x, x)
  logits = (
    (r"sinks: expected \[2\] for \[N\]", {"sinks": jnp.zeros(3)}),
    (
      r"sinks: .* or \[1, 4, 2\] for \[B, T, N\], got",
      {"sinks": jnp.zeros((1, 1, 2))},
    ),
    ("logits_soft_cap: .* above 0, got 0.0", {"logits_soft_cap": 0.0}),
    ("logits_soft_cap: .* a finite numb", {"logits_soft_cap": jnp.ones(())}),
    ("log_forget: .*is_causal=True", {"log_forget": jnp.zeros((1, 4, 2))}),
    (
      r"log_forget: expected \[1, 4, 2\] for",
      {"log_forget": jnp.zeros((1, 3, 2)), "is_causal": True},
    ),
  )
  for function in (attend, functools.partial(dense_attention, x, x, x)):
    assert_refused(function, logits)
  needs = "needs a GPU, got cpu; use 'xla' or None"
  assert_refused(
    attend,
    [
      (f"implementation: {message}", {"implementation": name})
      for name, message in (
        ("cudnn", f"'cudnn' {needs}"),
        ("tokamax", f"'tokamax' {needs}"),
        ("triton", "expected None or one of xla, cudnn, tokamax, got 'triton'"),
      )
    ],
  )
  for size in (0, (4,), (4, -1), True, 2.0):
    assert_refused(
      flash, [("block_size: expected a pos", {"block_size": size})]
    )


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


def traced_on_a_gpu(*qkv, **options):
  """The result of a compiled call; JAX keeps traces by function."""
  return jax.jit(lambda *qkv: flash_attention(*qkv, **options))(*qkv)


def in_half(qkv):
  return [np.asarray(x).astype(jnp.bfloat16) for x in qkv]


def test_cudnn_is_the_choice_on_a_gpu(monkeypatch):
  calls = on_a_gpu(monkeypatch)
  mask = np.ones((2, 1, 1, 13), bool)
  mask[0, ..., :2], mask[1] = False, False
  out = traced_on_a_gpu(
    *in_half(draw(13)), mask=jnp.asarray(mask), is_causal=True
  )
  assert len(calls) == 1
  assert calls[0]["implementation"] == "cudnn"
  assert calls[0]["is_causal"]
  # Queries 0 and 1 of the first example and all of the second see nothing.
  rows = np.asarray(out, np.float32).any(axis=(2, 3))
  np.testing.assert_array_equal(rows[0], np.arange(13) >= 2)
  assert not rows[1].any()


def test_tokamax_when_it_is_asked_for(monkeypatch):
  calls = on_a_gpu(monkeypatch)
  qkv = in_half(draw(13, value=5))
  out = traced_on_a_gpu(*qkv, scale=0.2, implementation="tokamax")
  # Exactly the names of tokamax 0.0.12; no `implementation`: it chooses.
  assert calls == [
    {"scale": 0.2, "mask": None, "bias": None, "is_causal": False}
  ]
  assert_close(out, definitions.dense_attention(*qkv, scale=0.2), 2e-2)


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
  qkv = qkv if dtype == "float32" else in_half(qkv)
  out = traced_on_a_gpu(*qkv, **jax.tree.map(jnp.asarray, call))
  expected = definitions.dense_attention(*qkv, **call)
  assert_close(out, expected, 1e-6 if dtype == "float32" else 2e-2)
  assert not calls
  with pytest.raises(ValueError, match=f"^implementation: 'cudnn' {reason}"):
    traced_on_a_gpu(*qkv, implementation="cudnn", **call)


def test_forgetting_keeps_its_digits_over_a_long_sequence():
  """Σ log f is −1,200 at the end, where a float32 has steps of 1e-4."""
  qkv = draw(1200, heads=2, batch=1)
  rng = np.random.default_rng(0)
  log_forget = -rng.exponential(1.0, size=(1, 1200, 2)).astype(np.float32)
  call = {"is_causal": True, "log_forget": jnp.asarray(log_forget)}
  expected = definitions.flash_attention(*qkv, **call)
  for function in (flash_attention, dense_attention):
    out = jax.jit(functools.partial(function, **call))(*qkv)
    assert_close(out, expected, 2e-6)


@pytest.mark.parametrize("name", ["dense", "flash", "sliding_window", "path"])
def test_a_closed_gate_leaves_nothing(name):
  """A forget gate of 0, in a call and for a token after a prompt."""
  length, options = 20, {"window": 12} if name == "sliding_window" else {}
  qkv = draw(length, heads=2, batch=1)
  gates = -np.random.default_rng(0).exponential(0.2, (1, length, 2))
  given = {"log_forget": gates.astype(np.float32)}
  if name == "path":
    given |= {"householder": 0 * qkv[1], "beta": np.zeros((1, length, 2))}
  record = ATTENTIONS[name](forget=True, **options)
  dims = Dims(2, 2, qkv[0].shape[3], length, 8)

  def call(given):
    return record.apply({}, *qkv, is_causal=True, **given)

  def token(given):
    cache = record.init_cache({}, 1, length, dims, jnp.float32)
    first, last = slice(length - 1), slice(length - 1, None)
    prompt, now = (
      jax.tree.map(lambda x, part=part: x[:, part], (qkv, given))
      for part in (first, last)
    )
    lengths = jnp.array([length - 1])
    cache = record.prefill({}, cache, *prompt[0], lengths, **prompt[1])
    return record.decode({}, cache, *now[0], **now[1])[0]

  def closed(log_forget):
    changed = np.array(given["log_forget"])
    changed[:, [5, 13]] = log_forget
    return given | {"log_forget": changed}

  expected = jax.jit(call)(closed(-1e4))
  for low in (-np.inf, -1e30):
    out = jax.jit(call)(closed(low))
    assert_close(out, expected, 1e-6)
    assert_close(jax.jit(token)(closed(low)), expected[:, -1:], 1e-6)
    total = jax.jit(jax.grad(lambda x: jnp.sum(call(x) ** 2)))(closed(low))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(total))
