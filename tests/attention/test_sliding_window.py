"""Sliding-window attention beyond the contract: blocks, dropout, memory, options.

Blocks are 8 queries long here instead of 64 or 128, so that short sequences already
run over several blocks, a shifted last one and clipped key slices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  Logits,
  Visible,
  attention_weights,
  definitions,
  make_block_mask,
  sliding_window,
  sliding_window_attention,
)
from attention.definitions.sliding_window import attended_pairs
from attention.platform import backend
from attention.testing import Case, assert_close
from tests import compiling
from tests.attention.calls import assert_defined, assert_dropout, draw
from tests.refusals import assert_refused

pytestmark = pytest.mark.usefixtures("short_blocks")


@pytest.mark.parametrize(
  ("case", "window", "dilation"),
  [
    (Case(("mask", "segments"), length=31), (5, 1), 1),
    (Case(length=5, source_length=37), 3, 1),
    (
      Case(("mask", "segments", "causal"), length=37, source_length=5),
      *(2, (2, 2, 1, 3)),
    ),
    # At blocks of the real length, of which wide windows have their own.
    (Case(length=263, num_heads=2, num_kv_heads=1, batch=1), (200, 71), 1),
  ],
)
def test_equals_the_definition(monkeypatch, case, window, dilation):
  if case.length > 100:
    monkeypatch.undo()
  arrays, options = case.draw()
  options |= {"window": window, "dilation": dilation}
  assert_defined(
    lambda qkv: sliding_window_attention(*qkv, **options),
    lambda qkv: definitions.sliding_window_attention(*qkv, **options),
    arrays,
  )


def test_a_window_with_room_for_all_keys_is_dense():
  """And one with every token global; a shorter one is not."""
  qkv, options = Case(("mask",)).draw()
  dense = definitions.dense_attention(*qkv, **options)
  every = jnp.asarray(np.tile(np.arange(13), (2, 1)))
  for more in ({"window": (13, 63)}, {"window": 0, "global_indices": every}):
    got = sliding_window_attention(*qkv, **options, **more)
    np.testing.assert_allclose(got, dense, atol=2e-6)
  short = sliding_window_attention(*qkv, **options, window=5)
  assert np.abs(short - dense).max() > 1e-3


def test_weights_are_the_union():
  """Of a window and of global tokens with projections of their own."""
  query, key, _ = draw(17, heads=2, kv_heads=1)
  indices = np.array([[3, 3, -1], [0, 16, 9]])
  options = {"global_indices": jnp.asarray(indices)}
  options["global_qkv"] = tuple(draw(17, heads=2, kv_heads=1, seed=5))
  attend = functools.partial(sliding_window_attention, window=1)
  weights = jax.jit(functools.partial(attention_weights, attend, **options))(
    query, key
  )
  visible = attended_pairs(query, key, window=1, global_indices=indices)
  np.testing.assert_array_equal(np.asarray(weights) > 0, visible)
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)


def test_dropout_drops_weights():
  """Beside all other options, and no two blocks share their draws."""
  dilations = 1, 2, 1, 2
  options = {"window": 5, "dilation": dilations}
  case = Case(("mask", "segments", "global", "scale"), length=61)
  attend = functools.partial(sliding_window_attention, **options)
  qkv, more = case.draw()
  assert_dropout(functools.partial(attend, **more), *qkv)
  kept, seen = assert_dropout(attend, *qkv), []
  offsets = np.arange(-5, 6)[None]
  for b, n in np.ndindex(2, 4):
    d = dilations[n]
    # Whole blocks of 8 queries of a residue class, and their whole windows.
    for t in range(8 * d, 61 - 13 * d, 8 * d):
      for r in range(d):
        rows = (t + r + d * np.arange(8))[:, None]
        seen.append(kept[b, n][rows, rows + d * offsets].tobytes())
  assert len(set(seen)) == len(seen) > 30


# test_memory.py has it without options, at blocks of the real length.
def test_memory_is_linear_in_length(monkeypatch):
  monkeypatch.setattr(backend, "WINDOW_ROWS", (64, 64))
  options = "causal", "mask", "segments", "global", "scale"

  def compiled(length):
    case = Case(options, length=length, batch=1, head_dim=4, value_dim=5)
    (query, *kv), call = case.draw()
    flags = {name: call.pop(name) for name in ("is_causal", "scale")}
    attend = functools.partial(
      sliding_window_attention, window=16, dilation=3, **flags
    )

    def loss(*arrays):
      return jnp.sum(attend(*arrays[:3], **arrays[3]))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)))
    return gradient.lower(query, *kv, call).compile()

  short, long = compiled(2048), compiled(8192)
  temporary, held = (
    x.memory_analysis().temp_size_in_bytes for x in (short, long)
  )
  assert held <= 4.2 * temporary
  # Not even one boolean for every pair of positions.
  assert held < 8192 * 8192 / 8
  # And the program is the same one, whatever the length.
  assert long.as_text().count(" = ") <= 1.05 * short.as_text().count(" = ")


def test_grouped_heads_need_no_repeated_keys():
  def temporaries(kv_heads):
    query = jax.ShapeDtypeStruct((1, 2048, 4, 64), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 2048, kv_heads, 64), jnp.float32)
    attend = functools.partial(
      sliding_window_attention, window=64, block_size=64
    )
    lowered = jax.jit(attend).lower(query, key, key)
    compiled = lowered.compile(compiler_options=compiling.AS_USERS)
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(1) < 0.8 * temporaries(4)


@pytest.mark.parametrize(
  ("window", "dilation", "ring"),
  [((2, 5), 3, 7), (2, (1, 1, 2, 4), 9), (0, 1, 1), (100, 1, 40)],
)
def test_the_cache_is_a_ring_of_the_window(window, dilation, ring):
  """The contract decodes with it."""
  attention = sliding_window(window=window, dilation=dilation)
  cache = attention.init_cache({}, 2, 40, Dims(4, 2, 4, 40), jnp.float32)
  assert cache.key.shape == (2, ring, 2, 4)


MOVED = Visible(query_start=4)


def test_a_window_may_be_longer_than_both_sequences():
  """Four queries at the positions from 20 on, and the keys from 0 to 8."""
  query, key, value = draw(9)
  query = query[:, :4]
  mask = np.arange(9)[None] >= np.arange(20, 24)[:, None] - 14
  out = sliding_window_attention(
    query, key, value, window=(14, 0), visible=Visible(query_start=20)
  )
  expected = definitions.dense_attention(
    query, key, value, mask=mask[None, None]
  )
  assert_close(out, expected, 1e-6)


def below(batch, head, query, key):
  return query >= key


def test_what_does_not_fit_is_refused(unchecked):
  query, key, value = draw(9)
  ids, indices = np.zeros((2, 9), int), jnp.zeros((2, 1), jnp.int32)
  attend = functools.partial(sliding_window_attention, query)
  assert_refused(
    lambda **change: attend(key, value, **{"window": 2} | change),
    {"window": -1},
    {"window": (1, 2, 3)},
    {"window": (1, -2)},
    {"window": 1.5},
    {"window": True},
    {"dilation": 0},
    {"dilation": (1, 2)},
    {"dilation": (1, 2, 3, 0)},
    ("key_segment_ids", {"query_segment_ids": ids}),
    {"global_indices": ids[0]},
    {"global_indices": ids[:1]},
    {"global_indices": ids.astype(np.float32)},
    {"global_qkv": (0, 0, 0)},
    {"dropout_rate": 1.0},
    ("dropout_rng", {"dropout_rate": 0.1}),
    {
      "visible": Visible(
        mods=(below,), block_mask=make_block_mask(below, length=9)
      )
    },
    {"logits": Logits(bias=jnp.zeros((1, 1, 9, 9)))},
    {"visible": MOVED, "dilation": 2},
    {"visible": MOVED, "global_indices": indices},
  )
  shorter = key[:, :8], value[:, :8]
  options = {"window": 2, "global_indices": indices}
  with pytest.raises(ValueError, match=r"global_indices: expected .* 9 and 8"):
    attend(*shorter, **options)
  with pytest.raises(ValueError, match=r"global_qkv: expected the shapes"):
    attend(key, value, **options, global_qkv=(query, *shorter))
  assert_refused(
    lambda **x: sliding_window(**{"window": 2} | x),
    {"window": -2},
    {"dilation": (1, 0)},
  )
