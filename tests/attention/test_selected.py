"""Attention to selected blocks: its definition, its gradients, its cost."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import dense_attention, selected_attention
from attention.definitions import selected_attention as definition
from tests.attention.test_lse import check, lse_of

LENGTH = 150
# Sizes of blocks in tiles, gathered, and of single keys; the first and the last do
# not divide the length.
SIZES = (40, 6, 1)
SELECTIONS = {"one": 1, "key_heads": 2, "query_heads": 4}
CASES = [(size, heads) for size in SIZES for heads in SELECTIONS.values()]


def draw(size, groups, length=LENGTH, source_length=LENGTH, dtype=jnp.float32):
  """Query, key, value and indices: in no order, some twice, some of no block."""
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((2, n, heads, width)), dtype)
    for n, heads, width in (
      (length, 4, 8),
      (source_length, 2, 8),
      (source_length, 2, 5),
    )
  )
  count = -(-source_length // size)
  shape = (2, length, groups, min(count + 1, 5))
  indices = rng.integers(-1, count + 2, shape)
  # A crowd at the first block, more than one tile holds.
  indices[:, ::2, :, 0] = 0
  call = {"block_indices": jnp.asarray(indices), "block_size": size}
  return (query, key, value), call


def options(length=LENGTH):
  """A mask that empties the second example, and segments."""
  rng = np.random.default_rng(1)
  mask = jnp.asarray(rng.random((2, 1, 1, length)) < 0.8).at[1].set(False)
  ids = jnp.asarray(np.arange(length)[None] // 60 * np.ones((2, 1), int))
  return {"mask": mask, "query_segment_ids": ids, "key_segment_ids": ids}


def by_mask(query, key, value, *, block_indices, block_size, **call):
  """Dense attention with the pairs of the selection as its mask."""
  blocks = (jnp.arange(key.shape[1]) // block_size).reshape(1, 1, 1, 1, -1)
  named = jnp.any(block_indices[..., None] == blocks, axis=3)
  repeats = query.shape[2] // named.shape[2]
  shown = jnp.moveaxis(jnp.repeat(named, repeats, axis=2), 2, 1)
  mask = call.pop("mask", None)
  shown = shown if mask is None else shown & mask
  return dense_attention(query, key, value, mask=shown, **call)


def gradients(function, arrays, **call):
  def loss(*arrays):
    out = function(*arrays, **call).astype(jnp.float32)
    return jnp.sum(jnp.sin(3.0 * out))

  return jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays)


@pytest.mark.parametrize(("size", "groups"), CASES)
def test_definition(size, groups):
  arrays, call = draw(size, groups)
  for more in ({}, {**options(), "is_causal": False}):
    got = jax.jit(partial(selected_attention, **call, **more))(*arrays)
    expected = definition(*arrays, **call, **more)
    np.testing.assert_allclose(got, expected, atol=2e-6)


@pytest.mark.parametrize(("size", "groups"), CASES)
def test_gradients_are_those_of_a_mask(size, groups):
  arrays, call = draw(size, groups)
  # NaN in padding goes nowhere.
  call |= {**options(), "is_causal": True}
  hidden = ~call["mask"][:, 0, 0, :, None, None]
  query, *rest = arrays
  spoiled = query, *(jnp.where(hidden, jnp.nan, x) for x in rest)
  expected = gradients(by_mask, arrays, **call)
  got = gradients(selected_attention, spoiled, **call)
  for x, y in zip(got, expected, strict=True):
    assert not np.any(x[1])
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_lse_is_that_of_the_keys_seen(size):
  arrays, call = draw(size, 2)
  identity = jnp.eye(LENGTH)[None, :, None]
  value = jnp.broadcast_to(identity, (2, LENGTH, 2, LENGTH))
  call |= {"mask": options()["mask"], "is_causal": False}
  shown = by_mask(*arrays[:2], value, **call) > 0
  mask = call.pop("mask")
  call = partial(selected_attention, **call)
  check(call, partial(lse_of, shown=shown), *arrays, mask)


@pytest.mark.parametrize("size", SIZES)
def test_the_future_changes_nothing(size):
  (query, key, value), call = draw(size, 2)
  out = jax.jit(partial(selected_attention, block_size=size))
  indices = call["block_indices"]
  before = out(query, key, value, block_indices=indices)
  late = jnp.arange(LENGTH) > 77
  changed = (
    jnp.where(late[None, :, None, None], 30.0, x) for x in (key, value)
  )
  after = out(query, *changed, block_indices=indices)
  np.testing.assert_array_equal(after[:, :78], before[:, :78])


@pytest.mark.parametrize("size", SIZES)
def test_huge_logits_and_bfloat16(size):
  arrays, call = draw(size, 2)
  arrays = tuple(300.0 * x for x in arrays)
  got = jax.jit(partial(selected_attention, **call))(*arrays)
  np.testing.assert_allclose(got, definition(*arrays, **call), rtol=1e-4)
  for x in gradients(selected_attention, arrays, **call):
    assert np.isfinite(x).all()
  arrays, call = draw(size, 2, dtype=jnp.bfloat16)
  got = jax.jit(partial(selected_attention, **call))(*arrays)
  assert got.dtype == jnp.bfloat16
  expected = definition(*(x.astype(jnp.float32) for x in arrays), **call)
  np.testing.assert_allclose(got.astype(jnp.float32), expected, atol=0.03)


@pytest.mark.parametrize("size", SIZES)
def test_keys_of_another_length(size):
  arrays, call = draw(size, 2, length=70, source_length=33)
  got = jax.jit(partial(selected_attention, **call))(*arrays)
  np.testing.assert_allclose(got, definition(*arrays, **call), atol=2e-6)


@pytest.mark.parametrize("size", SIZES)
def test_forward_mode(size):
  arrays, call = draw(size, 2)
  along = tuple(jnp.cos(7.0 * x) for x in arrays)

  def tangent(function):
    function = partial(function, **call, is_causal=True)
    return jax.jit(lambda x, dx: jax.jvp(function, x, dx)[1])(arrays, along)

  expected = tangent(by_mask)
  np.testing.assert_allclose(tangent(selected_attention), expected, atol=1e-5)


@pytest.mark.parametrize("size", [64, 16])
def test_memory_is_linear(size):
  """Twice the length takes about twice the memory, in both forms."""

  def temporaries(length):
    query, key = (
      jax.ShapeDtypeStruct((1, length, n, 16), jnp.float32) for n in (2, 1)
    )
    indices = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.int32)

    def loss(query, key, value, indices):
      out = selected_attention(
        query, key, value, block_indices=indices, block_size=size
      )
      return jnp.sum(out)

    program = jax.jit(jax.grad(loss, (0, 1, 2)))
    compiled = program.lower(query, key, key, indices).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(8192) < 2.3 * temporaries(4096)


def test_refusals():
  arrays, call = draw(6, 2)
  thrice = {**call, "block_indices": call["block_indices"].repeat(3, axis=2)}
  with pytest.raises(ValueError, match=r"block_indices: .* G = 1 .* 2 .* 4 "):
    selected_attention(*arrays, **thrice)
  mask = jnp.ones((2, 1, LENGTH, LENGTH), bool)
  with pytest.raises(ValueError, match="mask: expected a key mask"):
    selected_attention(*arrays, **call, mask=mask)
  with pytest.raises(ValueError, match="block_size: "):
    selected_attention(*arrays, **{**call, "block_size": 0})
