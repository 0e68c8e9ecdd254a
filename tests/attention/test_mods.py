"""score_mod, mask_mod and block masks: FlexAttention's functions of indices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  definitions,
  dense_attention,
  flash_attention,
  make_block_mask,
  platform,
  sliding_window_attention,
)
from attention.testing import assert_close
from tests.attention.forms import thorough

BATCH, HEADS, KV_HEADS, DIM = 2, 4, 2, 8


def drawn(length, seed=0):
  rng = np.random.default_rng(seed)
  return [
    rng.normal(size=(BATCH, length, n, DIM)).astype(np.float32)
    for n in (HEADS, KV_HEADS, KV_HEADS)
  ]


def prefix(b, n, t, s):
  """A prefix that differs by example is seen whole, the rest causally."""
  del n
  return (s <= t) | (s < 3 + 4 * b)


def far_falls(score, b, n, t, s):
  """Not linear, and different for heads and examples."""
  return score - 0.1 * (1 + n) * abs(t - s) * (1 + b) + 0.05 * score**2


def function_of(name):
  if name == "window":
    return (
      lambda *qkv, **call: sliding_window_attention(*qkv, window=9, **call),
      lambda *qkv, **call: definitions.sliding_window_attention(
        *qkv, window=9, **call
      ),
    )
  fast = {"dense": dense_attention, "flash": flash_attention}[name]
  return fast, definitions.dense_attention


@pytest.mark.parametrize("name", ["dense", "flash", "window"])
@pytest.mark.parametrize("length", [1, 7, 37])
def test_values_are_the_definition(name, length):
  fast, definition = function_of(name)
  qkv = drawn(length)
  call = {"score_mod": far_falls, "mask_mod": prefix}
  blocks = {} if name == "dense" else {"block_size": 5}
  cap, causal = {"logits_soft_cap": 2.0}, {"is_causal": True}
  for more, size in (({}, blocks), (cap, {}), (causal, blocks)):
    if length < 37 and more is not causal:
      continue
    expected = definition(*qkv, **call, **more)
    out = jax.jit(lambda *qkv, m=more, z=size: fast(*qkv, **call, **m, **z))
    assert_close(out(*qkv), expected, 1e-5)


@pytest.mark.parametrize("name", ["flash", "window"])
def test_gradients_reach_what_a_score_mod_closes_over(name):
  """Against dense attention, which autodiff differentiates; floats and integers."""
  qkv = list(map(jnp.asarray, drawn(37)))
  table = jax.random.normal(jax.random.key(1), (HEADS, 80))
  documents = jnp.asarray(np.sort(np.arange(74).reshape(2, 37) % 3, axis=1))

  def loss(function, qkv, table, documents):
    def score_mod(score, b, n, t, s):
      del b
      return score * (1.0 + table[n, t - s + 37])

    def mask_mod(b, n, t, s):
      del n
      return documents[b, t] == documents[b, s]

    out = function(*qkv, score_mod=score_mod, mask_mod=mask_mod)
    return jnp.sum(jnp.sin(out))

  def found(function):
    step = jax.jit(jax.grad(lambda *x: loss(function, *x), (0, 1)))
    return jax.tree.leaves(step(qkv, table, documents))

  def window_of_dense(*qkv, mask_mod, **call):
    def near(b, n, t, s):
      return mask_mod(b, n, t, s) & (abs(t - s) <= 9)

    return dense_attention(*qkv, mask_mod=near, **call)

  exact = window_of_dense if name == "window" else dense_attention
  fast, _ = function_of(name)
  expected = found(exact)
  for size, where in (({}, "cpu"), ({"block_size": 8}, "cpu"), ({}, "gpu")):
    with platform.tracing_for(where):
      got = found(lambda *qkv, z=size, **call: fast(*qkv, **call, **z))
    for one, other in zip(got, expected, strict=True):
      assert_close(one, other, 2e-5)


@pytest.mark.parametrize(
  ("length", "sizes"),
  [(37, (5, 16)), (40, (8, 5)), *thorough((37, 8), (40, 64))],
)
def test_a_block_mask_changes_no_number(sizes, length):
  def strips(b, n, t, s):
    del b, n
    return (t // 8 + s // 8) % 3 == 0

  qkv = list(map(jnp.asarray, drawn(length)))
  block_mask = make_block_mask(strips, length=length, block_size=sizes)

  def found(**more):
    def loss(*qkv):
      out = flash_attention(*qkv, mask_mod=strips, **more)
      return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*qkv)

  got, expected = found(block_mask=block_mask), found()
  for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    assert_close(one, other, 1e-5)


def test_hidden_blocks_are_not_visited():
  """A block that holds NaN and is hidden changes nothing: nobody reads it."""

  def halves(b, n, t, s):
    del b, n
    return (t < 32) == (s < 32)

  block_mask = make_block_mask(halves, length=64, block_size=16)
  np.testing.assert_array_equal(block_mask.counts, [2, 2, 2, 2])
  np.testing.assert_array_equal(block_mask.visited[2], [2, 3])
  assert block_mask.share == 0.5
  query, key, value = map(jnp.asarray, drawn(64))
  value = value.at[:, 32:].set(jnp.nan)
  out = flash_attention(
    query, key, value, mask_mod=halves, block_mask=block_mask
  )
  assert jnp.isfinite(out[:, :32]).all()


def test_a_row_without_keys_gives_zeros():
  def none_for_some(b, n, t, s):
    del b, n, s
    return t % 2 == 0

  qkv = list(map(jnp.asarray, drawn(12)))
  for function in (dense_attention, flash_attention):
    out = function(*qkv, mask_mod=none_for_some)
    assert not out[:, 1::2].any()
    assert out[:, ::2].any()


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"mask_mod": lambda b, n, t, s: t - s}, r"^mask_mod: expected bool, got"),
    ({"score_mod": 3}, r"^score_mod: expected a function, got int"),
    (
      {"block_mask": make_block_mask(prefix, length=12, batch=2)},
      r"^block_mask: expected the mask_mod that it was made of",
    ),
    (
      {
        "block_mask": make_block_mask(prefix, length=13, batch=2),
        "mask_mod": prefix,
      },
      r"^block_mask: expected one for lengths \(12, 12\), got \(13, 13\)",
    ),
  ],
)
def test_what_does_not_fit_raises(options, message, unchecked):
  with pytest.raises(ValueError, match=message):
    flash_attention(*map(jnp.asarray, drawn(12)), **options)
  with pytest.raises(ValueError, match=r"^batch: expected an int of at least"):
    make_block_mask(prefix, length=4, batch=0)


def test_a_dilated_window_has_none():
  qkv = list(map(jnp.asarray, drawn(12)))
  with pytest.raises(ValueError, match=r"^mask_mod: expected None with .*dila"):
    sliding_window_attention(*qkv, window=2, dilation=2, mask_mod=prefix)


def test_a_mod_inside_of_shard_map():
  """There its literals and arrays do not vary over devices, and the scores do."""
  auto = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((BATCH,), ("x",), auto, devices=jax.devices()[:BATCH])
  slopes = jnp.linspace(0.1, 0.4, HEADS)

  def score_mod(score, b, n, t, s):
    del b
    falls = slopes[n] * jax.nn.relu(t - s - 2.0)
    return jnp.where(t < 2 * s, score - falls, jnp.clip(score, -2, 2))

  def run(*qkv):
    def total(*qkv):
      see = {"score_mod": score_mod, "mask_mod": lambda b, n, t, s: s <= t + 2}
      return (flash_attention(*qkv, **see) ** 2).sum(axis=(1, 2, 3))

    out, pullback = jax.vjp(total, *qkv)
    return out, pullback(jnp.ones_like(out))

  rows = jax.P("x")
  parts = jax.shard_map(run, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
  qkv = drawn(16)
  found, expected = jax.jit(parts)(*qkv), jax.jit(run)(*qkv)
  for one, other in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    assert_close(one, other, 1e-6)
