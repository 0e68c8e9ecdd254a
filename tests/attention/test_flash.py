"""Flash attention beyond the contract: whole blocks, dropout, closed gates."""

import functools

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
from tests.attention.calls import assert_dropout, assert_equal, draw, pulled
from tests.refusals import assert_refused


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
  """At every step of causality, of the ragged end and of a mask."""
  qkv, options = Case((option,), length=length, batch=1).draw()
  options["is_causal"] = is_causal
  flash = functools.partial(flash_attention, block_size=block_size, **options)
  dense = functools.partial(dense_attention, **options)
  assert_equal(pulled(flash, *qkv), pulled(dense, *qkv), 1e-5)


def test_dropout_drops_weights_of_dense_attention():
  """Neither heads, rows nor blocks share their draws."""
  attend = functools.partial(flash_attention, block_size=(64, 32))
  kept = assert_dropout(attend, *draw(150, batch=1))[:, :, :128, :128]
  blocks = kept.reshape(4, 2, 64, 4, 32).transpose(0, 1, 3, 2, 4)
  assert len({block.tobytes() for block in blocks.reshape(32, -1)}) == 32


def test_what_does_not_fit_is_refused(unchecked):
  """The logits of dense attention as well."""
  x = jnp.zeros((1, 4, 2, 8))
  forget = jnp.zeros((1, 4, 2))
  attend = functools.partial(flash_attention, x, x, x)
  for function in (attend, functools.partial(dense_attention, x, x, x)):
    assert_refused(
      function,
      {"sinks": jnp.zeros(3)},
      {"sinks": jnp.zeros((1, 1, 2))},
      {"logits_soft_cap": 0.0},
      {"logits_soft_cap": jnp.ones(())},
      {"log_forget": forget},
      {"log_forget": forget[:, :3], "is_causal": True},
    )
  names = "cudnn", "tokamax", "triton"
  assert_refused(attend, *({"implementation": name} for name in names))
  sizes = 0, (4,), (4, -1), True, 2.0
  assert_refused(flash, *({"block_size": size} for size in sizes))


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


@pytest.mark.parametrize("attend", [dense_attention, flash_attention])
def test_a_sink_of_minus_infinity_takes_no_weight(attend):
  """Also of a query that sees no key."""
  qkv, mask = draw(9), np.arange(9) > np.array([[[[8]]], [[[2]]]])
  sinks = np.array([-np.inf, 0.5, 2.0, -np.inf], np.float32)
  call = {"mask": mask, "return_lse": True}
  (out, lse), gradients = pulled(
    lambda *x: attend(*x[:3], sinks=x[3], **call), *qkv, jnp.asarray(sinks)
  )
  expected = definitions.dense_attention(*qkv, mask=mask)
  assert_close(out[:, :, ::3], expected[:, :, ::3], 1e-6)
  assert not out[0].any()
  np.testing.assert_array_equal(lse[0, 0], sinks)
  assert all(np.isfinite(x).all() for x in gradients)


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
