"""`attend`, the loop of the softmax family: values, lse, gradients, merging."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, platform, visible
from attention.logits import Logits
from attention.loop import attend, merge
from attention.testing import assert_close
from attention.visible import Visible
from tests.attention.forms import thorough

BATCH, HEADS, KV_HEADS, DIM, VALUES = 2, 4, 2, 8, 6


def drawn(length, source_length=None, seed=0):
  rng = np.random.default_rng(seed)
  source_length = source_length or length
  return [
    jnp.asarray(rng.normal(size=(BATCH, t, n, d)), jnp.float32)
    for t, n, d in (
      (length, HEADS, DIM),
      (source_length, KV_HEADS, DIM),
      (source_length, KV_HEADS, VALUES),
    )
  ]


def case(name, length):
  """What the loop takes, and the same as options of dense attention."""
  rng = np.random.default_rng(1)

  def normal(*shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)

  ids = jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, length)), axis=1))
  keep = jnp.asarray(rng.random((BATCH, length)) < 0.7)
  pairs = jnp.asarray(rng.random((BATCH, 1, length, length)) < 0.3)
  position = np.arange(length)
  distance = position[None, :] - position[:, None]
  near = jnp.asarray((distance >= -5) & (distance <= 3))[None, None]
  gates = -jnp.abs(normal(BATCH, length, HEADS))
  tables = {
    "relative_bias": normal(HEADS, 7),
    "relative_keys": normal(HEADS, 9, DIM),
  }

  def falls(score, b, n, t, s):
    del b
    return score - 0.1 * (1 + n) * abs(t - s)

  def even(b, n, t, s):
    del n
    return (t + s + b) % 2 == 0

  return {
    "plain": (Visible(), {}, {}),
    "causal": (visible.causal(), {}, {"is_causal": True}),
    "mask": (
      visible.key_mask(keep) & visible.pair_mask(pairs),
      {},
      {"mask": keep[:, None, None] & pairs},
    ),
    "segments": (
      visible.segments(ids, ids) & visible.causal(),
      {},
      {"query_segment_ids": ids, "key_segment_ids": ids, "is_causal": True},
    ),
    "window": (visible.window(5, 3), {}, {"mask": near}),
    "window_causal": (
      visible.window(5, 3) & visible.causal() & visible.key_mask(keep),
      {},
      {"mask": near & keep[:, None, None], "is_causal": True},
    ),
    "tables": (Visible(), tables, tables),
    "window_tables": (visible.window(5, 3), tables, tables | {"mask": near}),
    "bias": (
      Visible(),
      {"bias": normal(1, HEADS, length, length), "scale": 0.3},
      {"bias": None, "scale": 0.3},
    ),
    "cap_sinks": (
      visible.causal(),
      {"soft_cap": 1.5, "sinks": normal(HEADS)},
      {"is_causal": True, "logits_soft_cap": 1.5, "sinks": None},
    ),
    "gates": (
      visible.causal(),
      {"log_forget": gates},
      {"is_causal": True, "log_forget": gates},
    ),
    "mods": (
      visible.mask_mod(even),
      {"score_mod": falls},
      {"mask_mod": even, "score_mod": falls},
    ),
    "window_gates": (
      visible.window(5, 0),
      {"log_forget": gates, "score_mod": falls},
      {
        "mask": near,
        "is_causal": True,
        "log_forget": gates,
        "score_mod": falls,
      },
    ),
  }[name]


CASES = [
  "plain",
  "causal",
  "mask",
  "segments",
  "window",
  "window_causal",
  "tables",
  "window_tables",
  "bias",
  "cap_sinks",
  "gates",
  "mods",
  "window_gates",
]


def as_definition(options, logits):
  """Options of a definition, with arrays that both have taken over."""
  return {
    name: logits.get(name) if value is None else value
    for name, value in options.items()
  }


@pytest.mark.parametrize(
  ("length", "block"), [*thorough((1, None), (7, (5, 16))), (37, (8, 8))]
)
@pytest.mark.parametrize("name", CASES)
def test_values_are_the_definition(name, length, block):
  """Other blocks have the same values: see the test of gradients."""
  qkv = drawn(length)
  sees, logits, options = case(name, length)
  options = as_definition(options, logits)
  expected = definitions.dense_attention(*qkv, **options)
  # Of the sum of exponentials a definition shows what a constant value shows.
  out, lse = jax.jit(
    lambda *qkv: attend(*qkv, sees, Logits(**logits), block=block)
  )(*qkv)
  assert_close(out, expected, 1e-5)
  assert lse.shape == out.shape[:3]
  assert lse.dtype == jnp.float32


def plain(query, key, value, pairs, sinks=None):
  """(out, lse) by whole matrices, for autodiff."""
  key, value = (jnp.repeat(x, HEADS // KV_HEADS, axis=2) for x in (key, value))
  x = jnp.einsum("btnh,bsnh->bnts", query, key) / DIM**0.5
  x = jnp.where(pairs, x, -1e30)
  if sinks is not None:
    column = jnp.broadcast_to(sinks[None, :, None, None], (*x.shape[:3], 1))
    x = jnp.concatenate([x, column], -1)
  lse = jax.scipy.special.logsumexp(x, axis=-1)
  p = jnp.exp(x - lse[..., None])[..., : key.shape[1]]
  return jnp.einsum("bnts,bsnv->btnv", p, value), jnp.moveaxis(lse, 1, 2)


@pytest.mark.parametrize(
  ("sides", "block", "where"),
  [
    (None, (8, 5), "gpu"),
    ((None, 0), (5, 16), "cpu"),
    ((6, 2), (5, 16), "gpu"),
    *thorough(
      (None, None, "cpu"), ((None, 0), None, "gpu"), ((6, 2), (8, 5), "cpu")
    ),
  ],
)
def test_lse_and_its_gradients(sides, block, where):
  """A loss of out and lse together, against autodiff through whole matrices."""
  length = 37
  qkv = drawn(length)
  sinks = jnp.linspace(-1.0, 1.0, HEADS)
  position = np.arange(length)
  distance = position[None, :] - position[:, None]
  left, right = sides or (None, None)
  pairs = np.ones((length, length), bool)
  pairs &= True if left is None else distance >= -left
  pairs &= True if right is None else distance <= right

  def loss(function, qkv, sinks):
    out, lse = function(*qkv, sinks)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))

  def fast(query, key, value, sinks):
    sees = visible.window(left, right)
    return attend(query, key, value, sees, Logits(sinks=sinks), block=block)

  def exact(query, key, value, sinks):
    return plain(query, key, value, pairs, sinks)

  with platform.tracing_for(where):
    got = jax.jit(jax.value_and_grad(lambda *x: loss(fast, *x), (0, 1)))(
      qkv, sinks
    )
  expected = jax.jit(jax.value_and_grad(lambda *x: loss(exact, *x), (0, 1)))(
    qkv, sinks
  )
  for one, other in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
    assert_close(one, other, 1e-5)


# What `window_causal`, `window_tables`, `gates` and `mods` have as well.
_PARTS = ("causal", "window", "tables", "window_gates")


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(x, marks=[pytest.mark.thorough] if x in _PARTS else [])
    for x in CASES
    if x != "plain"
  ],
)
def test_values_and_gradients_do_not_depend_on_the_tiles(name):
  """Several visits, one visit and several tiles a step are one function."""
  length = 37
  qkv = drawn(length)
  sees, logits, _ = case(name, length)
  mod = logits.pop("score_mod", None)
  cap = logits.pop("soft_cap", None)
  scale = logits.pop("scale", None)

  def found(block, where):
    def loss(qkv, arrays):
      own = Logits(scale=scale, soft_cap=cap, score_mod=mod, **arrays)
      out, lse = attend(*qkv, sees, own, block=block)
      lse = jnp.where(jnp.isinf(lse), 0.0, lse)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

    with platform.tracing_for(where):
      run = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
      return jax.tree.leaves(run(qkv, logits))

  expected = found((length, length), "cpu")
  for block, where in (((5, 16), "cpu"), ((8, None), "gpu")):
    for one, other in zip(found(block, where), expected, strict=True):
      assert_close(one, other, 2e-5)


def test_rows_that_see_nothing():
  """Zeros, −∞, and no gradient, not even of NaN behind a key mask."""
  query, key, value = drawn(20)
  keep = jnp.arange(20)[None] >= jnp.asarray([[6], [20]])
  key = jnp.where(keep[..., None, None], key, jnp.nan)
  value = jnp.where(keep[..., None, None], value, jnp.nan)
  sees = visible.key_mask(keep) & visible.causal()

  def loss(*qkv):
    out, lse = attend(*qkv, sees, block=(8, 8))
    return jnp.sum(out) + jnp.sum(jnp.exp(lse)), (out, lse)

  run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  grads, (out, lse) = run(query, key, value)
  assert not np.any(out[0, :6])
  assert np.all(np.isneginf(lse[0, :6]))
  assert not np.any(out[1])
  assert np.all(np.isfinite(lse[0, 6:]))
  for grad in grads:
    assert np.all(np.isfinite(grad))
    assert not np.any(grad[1])
    assert not np.any(grad[0, :6])


def test_merge_of_disjoint_keys_is_the_whole():
  qkv = drawn(30)
  keep = jnp.asarray(np.random.default_rng(0).random((BATCH, 30)) < 0.5)

  def merged(*qkv):
    return merge(
      *(
        attend(*qkv, visible.causal() & visible.key_mask(m))
        for m in (keep, ~keep)
      )
    )

  def whole(*qkv):
    return attend(*qkv, visible.causal())

  def found(function):
    def loss(*qkv):
      out, lse = function(*qkv)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), (out, lse)

    return jax.tree.leaves(
      jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    )

  for one, other in zip(found(merged), found(whole), strict=True):
    assert_close(one, other, 1e-5)


def test_bands_and_positions():
  """0 ≤ a − b < w of codes; a window of positions that do not start at 0."""
  query, key, value = drawn(21, 33)
  codes = jnp.asarray(np.random.default_rng(0).integers(0, 9, (BATCH, 33)))
  sees = Visible(
    bands=((codes[:, :21], codes, 3, True), (codes[:, :21], codes, 1, False))
  )
  apart = codes[:, :21, None] - codes[:, None]
  inside = (apart >= 1) & (apart < 3)
  expected = definitions.dense_attention(
    query, key, value, mask=inside[:, None]
  )
  out, _ = attend(query, key, value, sees, block=(8, 8))
  assert_close(out, expected, 1e-5)
  sees = dataclasses.replace(visible.window(4, 0), query_start=40, key_start=20)
  distance = np.arange(20, 53)[None] - np.arange(40, 61)[:, None]
  near = (distance >= -4) & (distance <= 0)
  expected = definitions.dense_attention(
    query, key, value, mask=near[None, None]
  )
  out, _ = attend(query, key, value, sees)
  assert_close(out, expected, 1e-5)


def test_dropout_is_the_same_for_all_tiles():
  qkv = drawn(37)
  key = jax.random.key(3)

  def found(block, sees):
    def loss(*qkv):
      out, lse = attend(
        *qkv, sees, block=block, dropout_rate=0.4, dropout_rng=key
      )
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse)), out

    return jax.tree.leaves(
      jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*qkv)
    )

  expected = found((37, 37), visible.window(6, 2))
  for block in ((8, None), (8, 5)):
    for one, other in zip(
      found(block, visible.window(6, 2)), expected, strict=True
    ):
      assert_close(one, other, 1e-5)
