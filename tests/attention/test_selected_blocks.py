"""Attention to selected blocks: its definition, its gradients, its cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import selected_attention
from attention.definitions import selected_attention as definition
from tests.attention import calls
from tests.attention.test_lse import check, key_mask, of_pairs, weights_of
from tests.attention.test_platforms import trips
from tests.refusals import assert_refused

LENGTH = 150
# Sizes of blocks in tiles, gathered, and of single keys; the first and the last do
# not divide the length. Selections for all heads, for key heads, for query heads.
SIZES = (40, 6, 1)
CASES = [(40, 1), (40, 4), (6, 2), (6, 4), (1, 1), (1, 2)]
by_size = pytest.mark.parametrize("size", SIZES)


def draw(size, groups=2, length=LENGTH, source=None, seed=0):
  """Query, key, value and indices: in no order, some twice, some of no block."""
  qkv = calls.draw(length, source, value=5, seed=seed)
  count = -(-qkv[1].shape[1] // size)
  shape = (2, length, groups, min(count + 1, 5))
  indices = np.random.default_rng(0).integers(-1, count + 2, shape)
  # A crowd at the first block, more than one tile holds.
  indices[:, ::2, :, 0] = 0
  return qkv, jnp.asarray(indices)


def options():
  """A mask that empties the second example, and segments."""
  ids = jnp.asarray(np.arange(LENGTH)[None] // 60 * np.ones((2, 1), int))
  segments = {"query_segment_ids": ids, "key_segment_ids": ids}
  return {"mask": key_mask(LENGTH), **segments}


@partial(jax.jit, static_argnames=("size", "is_causal"))
def attend(qkv, indices, size, is_causal=True, **call):
  call |= {"block_indices": indices, "is_causal": is_causal}
  return selected_attention(*qkv, block_size=size, **call)


def assert_defined(qkv, indices, size, atol=2e-6, rtol=0.0, **call):
  got = attend(qkv, indices, size, **call)
  wide = [np.asarray(x, np.float64) for x in qkv]
  call |= {"block_indices": np.asarray(indices), "block_size": size}
  expected = definition(*wide, **call)
  got = np.asarray(got, np.float64)
  np.testing.assert_allclose(got, expected, atol=atol, rtol=rtol)


@pytest.mark.parametrize(("size", "groups"), CASES)
def test_gradients_and_lse_are_those_of_a_mask(size, groups):
  """Those of out and lse; NaN in padding goes nowhere."""
  (query, *kv), indices = draw(size, groups)
  call = {"block_indices": indices, "block_size": size, **options()}
  call["is_causal"] = True
  keep = call["mask"][:, 0, 0, :, None, None]

  def spoiled(query, *kv, **more):
    kv = (jnp.where(keep, x, jnp.nan) for x in kv)
    return selected_attention(query, *kv, **call, **more)

  shown = weights_of(definition, query, kv[0], **call) > 0
  check(spoiled, partial(of_pairs, shown=shown), query, *kv)


@by_size
def test_definition(size):
  assert_defined(*draw(size), size)
  assert_defined(*draw(size), size, is_causal=False, **options())
  # Keys of another length.
  assert_defined(*draw(size, length=70, source=33), size)


@by_size
def test_the_future_changes_nothing(size):
  (query, *kv), indices = draw(size)
  before = attend([query, *kv], indices, size)
  late = (np.arange(LENGTH) > 77)[None, :, None, None]
  changed = [jnp.asarray(np.where(late, np.float32(30.0), x)) for x in kv]
  after = attend([query, *changed], indices, size)
  np.testing.assert_array_equal(after[:, :78], before[:, :78])


@by_size
def test_huge_logits_and_bfloat16(size):
  # Of a seed without two logits that are nearly alike.
  qkv, indices = draw(size, seed=1)
  huge = [300 * np.asarray(x) for x in qkv]
  # Values are of size 300, and a sum of opposite ones loses digits.
  assert_defined(huge, indices, size, rtol=1e-4, atol=1e-3)
  call = {"block_indices": indices, "block_size": size}
  _, gradients = calls.pulled(partial(selected_attention, **call), *huge)
  for x in gradients:
    assert np.isfinite(x).all()
  half = [jnp.asarray(x, jnp.bfloat16) for x in qkv]
  assert attend(half, indices, size).dtype == jnp.bfloat16
  assert_defined(half, indices, size, atol=0.03)


@by_size
def test_forward_mode(size):
  qkv, indices = draw(size)
  call = {"block_indices": indices, "block_size": size, "is_causal": True}
  along = [np.cos(7.0 * np.asarray(x)) for x in qkv]
  function = partial(selected_attention, **call)
  tangent = jax.jit(lambda x, dx: jax.jvp(function, x, dx)[1])
  ahead, behind = (
    definition(
      *(
        np.asarray(x, float) + h * dx for x, dx in zip(qkv, along, strict=True)
      ),
      **call,
    )
    for h in (1e-6, -1e-6)
  )
  expected = (ahead - behind) / 2e-6
  np.testing.assert_allclose(tangent(qkv, along), expected, atol=1e-5)


@pytest.mark.parametrize("size", [64, 16])
def test_memory_is_linear(size):
  """Twice the length takes about twice the memory, in both forms."""

  def temporaries(length):
    query, key = (
      jax.ShapeDtypeStruct((1, length, n, 16), jnp.float32) for n in (2, 1)
    )
    indices = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.int32)

    def loss(query, key, value, indices):
      call = {"block_indices": indices, "block_size": size}
      return jnp.sum(selected_attention(query, key, value, **call))

    program = jax.jit(jax.grad(loss, (0, 1, 2)))
    compiled = program.lower(query, key, key, indices).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(8192) < 2.3 * temporaries(4096)


@pytest.mark.parametrize(
  ("size", "num_blocks", "steps"), [(16, 16, 2), (8, 4, 32)]
)
def test_no_step_is_too_small(size, num_blocks, steps):
  """On a CPU, whose steps are the least: two full tiles of each block, all keys.

  128 queries select 16 blocks each, 2 · 64 times each of 16; eight queries gather
  4 · 8 keys each, as many as the 256 that a step's gradients are added to.
  """
  x = jax.ShapeDtypeStruct((1, 256, 1, 4), jnp.float32)
  indices = jax.ShapeDtypeStruct((1, 256, 1, num_blocks), jnp.int32)
  attend = jax.jit(partial(selected_attention, block_size=size))
  traced = attend.trace(x, x, x, block_indices=indices)
  assert next(trips(traced.jaxpr.jaxpr)) == steps


def test_refusals(unchecked):
  qkv, indices = draw(6)
  call = {"block_indices": indices, "block_size": 6}
  attend = partial(selected_attention, *qkv)
  assert_refused(
    lambda **change: attend(**call | change),
    {"block_indices": jnp.asarray(np.repeat(indices, 3, axis=2))},
    {"mask": np.ones((2, 1, LENGTH, LENGTH), bool)},
    {"block_size": 0},
  )
