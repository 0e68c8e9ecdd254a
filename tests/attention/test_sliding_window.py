"""Sliding-window attention against its definition, in values and gradients.

Blocks are 8 queries long here instead of 64 or 128, so that short sequences already
run over several blocks, a shifted last one and clipped key slices.
"""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  Dims,
  Visible,
  attention_weights,
  definitions,
  sliding_window,
  sliding_window_attention,
)
from attention.definitions.sliding_window import attended_pairs
from attention.platform import backend
from tests import compiling
from tests.attention.calls import assert_refused
from tests.attention.window_cases import (
  ALL,
  check_definition,
  check_dropout,
  draw_inputs,
  draw_options,
  forward_and_gradients,
  to_jax,
)

pytestmark = pytest.mark.usefixtures("short_blocks")

# Of what the laws below ask, one program: all options at once, over four blocks.
LENGTH = 31
EVERY = {
  "window": 3,
  "dilation": 1,
  **draw_options("causal " + ALL, LENGTH, LENGTH),
}


@pytest.mark.parametrize(
  ("length", "source", "window", "dilation", "names", "kv_heads"),
  [
    (7, 7, 8, 3, "segments global", 2),
    (31, 31, (5, 1), 1, "mask segments", 2),
    (31, 31, 3, 1, "causal " + ALL, 2),
    (31, 31, 2, (5, 1, 1, 5), "mask global", 1),
    (5, 37, 3, 1, "", 2),
    (37, 5, 2, (2, 2, 1, 3), "mask segments causal", 2),
  ],
)
def test_equals_the_definition(
  length, source, window, dilation, names, kv_heads
):
  *qkv, cotangent = draw_inputs(length, source, kv_heads=kv_heads)
  options = draw_options(names, length, source)
  check_definition(qkv, cotangent, window=window, dilation=dilation, **options)


def test_separate_global_projections():
  *qkv, cotangent = draw_inputs(19)
  own = tuple(draw_inputs(19, seed=5)[:3])
  options = draw_options("causal " + ALL, 19, 19)
  options |= {"window": 2, "dilation": 2, "global_qkv": own}
  check_definition(qkv, cotangent, **options)


def test_bfloat16():
  *qkv, cotangent = draw_inputs(LENGTH, dtype=jnp.bfloat16)
  check_definition(qkv, cotangent, tolerance=2e-2, **EVERY | {"dilation": 2})
  attend = functools.partial(sliding_window_attention, window=4)
  assert jax.eval_shape(attend, *qkv).dtype == jnp.bfloat16


@pytest.mark.parametrize(
  ("window", "options"),
  [
    (12, {"is_causal": True}),
    ((13, 63), {}),
    (0, {"global_indices": np.tile(np.arange(13), (2, 1))}),
  ],
)
def test_a_window_with_room_for_all_keys_is_dense(window, options):
  """And one with every token global; a shorter one is not."""
  *qkv, _ = draw_inputs(13)
  mask = np.random.default_rng(1).random((2, 1, 1, 13)) < 0.7
  attend = functools.partial(
    sliding_window_attention, mask=jnp.asarray(mask), **to_jax(options)
  )
  options = {x: y for x, y in options.items() if x == "is_causal"}
  dense = definitions.dense_attention(*qkv, mask=mask, **options)
  got = jax.jit(functools.partial(attend, window=window))(*qkv)
  np.testing.assert_allclose(got, dense, atol=2e-6)
  if not window:
    return
  short = jax.jit(functools.partial(attend, window=5))(*qkv)
  assert np.abs(short - dense).max() > 1e-3


@pytest.mark.parametrize("window", [(9, 30), (200, 71)])
def test_blocks_of_the_real_length(monkeypatch, window):
  """Narrow and wide windows have blocks of their own."""
  monkeypatch.undo()
  *qkv, cotangent = draw_inputs(263, heads=2, kv_heads=1, batch=1)
  check_definition(qkv, cotangent, window=window)


def test_large_logits_and_empty_rows():
  (query, key, *rest), cotangent = (
    draw_inputs(LENGTH)[:3],
    draw_inputs(LENGTH)[3],
  )
  qkv = 1e2 * query, 1e2 * key, *rest
  out, grads = forward_and_gradients(qkv, cotangent, **EVERY)
  for array in (out, *grads):
    assert np.all(np.isfinite(array))
  mask = np.ones((2, 1, 1, LENGTH), bool)
  mask[0] = False
  qkv = query, key, *rest
  out, grads = forward_and_gradients(qkv, cotangent, **EVERY | {"mask": mask})
  for array in (out, *grads):
    assert np.all(np.isfinite(array))
    assert not np.any(array[0])
    assert np.any(array[1])


def test_queries_beyond_the_last_window_get_zeros():
  query, key, value, _ = draw_inputs(30, 4)
  attend = jax.jit(functools.partial(sliding_window_attention, window=3))
  out = attend(query, key, value)
  assert not np.any(out[:, 7:])
  assert np.all(np.any(out[:, :7], axis=-1))


@pytest.mark.parametrize("dilation", [1, (1, 2, 3, 3)])
def test_the_future_changes_nothing_at_all(dilation):
  options = EVERY | {"dilation": dilation}
  options["global_indices"] = options["global_indices"].copy()
  options["global_indices"][:, 3] = LENGTH - 1
  *qkv, cotangent = draw_inputs(LENGTH)
  out, _ = forward_and_gradients(qkv, cotangent, **options)
  changed = [np.array(x) for x in qkv]
  for x in changed:
    x[:, -1] += 30.0
  other, _ = forward_and_gradients(changed, cotangent, **options)
  np.testing.assert_array_equal(out[:, :-1], other[:, :-1])


@pytest.mark.parametrize("fill", [np.nan, 1e30])
def test_masked_keys_are_not_read(fill):
  """Not a global one either."""
  *qkv, cotangent = draw_inputs(LENGTH)
  mask = EVERY["mask"].copy()
  mask[:, :, :, EVERY["global_indices"][0, 0]] = False
  hidden = ~mask[:, 0, 0, :, None, None]
  filled = [qkv[0], *(np.where(hidden, fill, x) for x in qkv[1:])]
  options = EVERY | {"mask": mask}
  plain = forward_and_gradients(qkv, cotangent, **options)
  other = forward_and_gradients(filled, cotangent, **options)
  chex.assert_trees_all_equal(plain, other)


@pytest.mark.parametrize("has_own", [False, True])
def test_weights_are_the_union(has_own):
  """Of a window and of global tokens, with projections of their own or without."""
  query, key, *_ = draw_inputs(17, heads=2, kv_heads=1)
  indices = np.array([[3, 3, -1], [0, 16, 9]])
  options = {"global_indices": jnp.asarray(indices)}
  if has_own:
    own = draw_inputs(17, heads=2, kv_heads=1, seed=5)
    options["global_qkv"] = tuple(own[:3])
  attend = functools.partial(sliding_window_attention, window=1)
  weights = jax.jit(functools.partial(attention_weights, attend, **options))(
    query, key
  )
  visible = attended_pairs(query, key, window=1, global_indices=indices)
  np.testing.assert_array_equal(np.asarray(weights) > 0, visible)
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)


def test_dropout_drops_weights():
  *qkv, cotangent = draw_inputs(61)
  options = draw_options(ALL, 61, 61)
  attend = functools.partial(
    sliding_window_attention, window=5, dilation=(1, 2, 1, 2), **to_jax(options)
  )
  check_dropout(attend, qkv, cotangent, options.get("scale"))


def test_no_two_blocks_share_their_dropout():
  dilations = (1, 2, 1, 2)
  query, key, *_ = draw_inputs(61)
  attend = functools.partial(
    sliding_window_attention,
    window=5,
    dilation=dilations,
    dropout_rate=0.25,
    dropout_rng=jax.random.key(3),
  )
  weights = jax.jit(functools.partial(attention_weights, attend))(query, key)
  kept, seen = np.asarray(weights) != 0, []
  offsets = np.arange(-5, 6)[None]
  for b, n in np.ndindex(2, 4):
    d = dilations[n]
    # Whole blocks of 8 queries of a residue class, and their whole windows.
    for t in range(8 * d, 61 - 13 * d, 8 * d):
      for r in range(d):
        rows = (t + r + d * np.arange(8))[:, None]
        seen.append(kept[b, n][rows, rows + d * offsets].tobytes())
  assert len(set(seen)) == len(seen) > 30


def _lowered(length, names="", dilation=1):
  """The program of a call and its gradients; nothing is run."""
  shapes = [
    jax.ShapeDtypeStruct(x.shape, x.dtype)
    for x in draw_inputs(length, batch=1, kv_heads=2)
  ]
  options = draw_options(names, length, length)
  arrays = {n: x[:1] for n, x in options.items() if isinstance(x, np.ndarray)}
  rest = {n: x for n, x in options.items() if n not in arrays}

  def backward(query, key, value, cotangent, arrays):
    def attend(*qkv):
      return sliding_window_attention(
        *qkv, window=16, dilation=dilation, **arrays, **rest
      )

    return jax.vjp(attend, query, key, value)[1](cotangent)

  return jax.jit(backward).lower(*shapes, arrays)


# test_memory.py has it without options, at blocks of the real length.
def test_memory_is_linear_in_length(monkeypatch):
  monkeypatch.setattr(backend, "window_rows", lambda width: 64)
  temp, instructions = {}, {}
  for length in (2048, 8192):
    compiled = _lowered(length, "causal " + ALL, dilation=3).compile()
    temp[length] = compiled.memory_analysis().temp_size_in_bytes
    instructions[length] = compiled.as_text().count(" = ")
  assert temp[8192] <= 4.2 * temp[2048]
  # Not even one boolean for every pair of positions.
  assert temp[8192] < 8192 * 8192 / 8
  # And the program is the same one, whatever the length.
  assert instructions[8192] <= instructions[2048] * 1.05


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
def test_decode_is_the_causal_call(window, dilation, ring):
  """The contract has it where examples are at different positions."""
  attention = sliding_window(window=window, dilation=dilation)
  query, key, value, _ = draw_inputs(40)
  cache = attention.init_cache({}, 2, 40, Dims(4, 2, 4, 40), jnp.float32)
  assert cache.key.shape == (2, ring, 2, 4)

  def step(cache, qkv):
    out, cache = attention.decode({}, cache, *(x[:, None] for x in qkv))
    return cache, out[:, 0]

  rows = [np.moveaxis(x, 1, 0) for x in (query, key, value[..., :4])]
  _, out = jax.jit(lambda *args: jax.lax.scan(step, *args))(cache, rows)
  expected = definitions.sliding_window_attention(
    query, key, value[..., :4], window=window, dilation=dilation, is_causal=True
  )
  np.testing.assert_allclose(np.moveaxis(out, 0, 1), expected, atol=1e-5)


def test_a_traced_scale_has_a_gradient(unchecked):
  query, key, value, cotangent = draw_inputs(9)
  options = {"window": 2, "global_indices": jnp.array([[2], [-1]])}

  def loss(scale, query):
    out = sliding_window_attention(query, key, value, scale=scale, **options)
    return jnp.sum(out * cotangent)

  run = jax.jit(jax.value_and_grad(loss, (0, 1)))
  found, (by_scale, by_query) = run(jnp.float32(0.3), query)
  expected = definitions.sliding_window_attention(
    query, key, value, scale=0.3, **options
  )
  np.testing.assert_allclose(found, np.sum(expected * cotangent), rtol=1e-5)
  # Only the product of scale and query matters.
  np.testing.assert_allclose(
    by_scale * 0.3, np.sum(by_query * query), rtol=1e-4
  )


MOVED = Visible(query_start=4)


def test_what_does_not_fit_is_refused(unchecked):
  query, key, value, _ = draw_inputs(9)
  ids, indices = np.zeros((2, 9), int), jnp.zeros((2, 1), jnp.int32)
  assert_refused(
    functools.partial(sliding_window_attention, query, key, value),
    [
      (f"{message}: expected", {"window": 2, **options})
      for message, options in (
        ("window", {"window": -1}),
        ("window", {"window": (1, 2, 3)}),
        ("window", {"window": (1, -2)}),
        ("window", {"window": 1.5}),
        ("window", {"window": True}),
        ("dilation", {"dilation": 0}),
        ("dilation", {"dilation": (1, 2)}),
        ("dilation", {"dilation": (1, 2, 3, 0)}),
        ("mask", {"mask": np.ones((2, 1, 9, 9), bool)}),
        ("mask", {"mask": np.ones((2, 1, 1, 8), bool)}),
        ("key_segment_ids", {"query_segment_ids": ids}),
        ("global_indices", {"global_indices": ids[0]}),
        ("global_indices", {"global_indices": ids[:1]}),
        ("global_indices", {"global_indices": ids.astype(np.float32)}),
        ("global_qkv", {"global_qkv": (0, 0, 0)}),
        ("dropout_rate", {"dropout_rate": 1.0}),
        ("dropout_rng", {"dropout_rate": 0.1}),
        ("visible", {"visible": MOVED, "dilation": 2}),
        ("visible", {"visible": MOVED, "global_indices": indices}),
      )
    ],
  )
  shorter = key[:, :8], value[:, :8]
  options = {"window": 2, "global_indices": indices}
  with pytest.raises(ValueError, match=r"global_indices: expected .* 9 and 8"):
    sliding_window_attention(query, *shorter, **options)
  with pytest.raises(ValueError, match=r"global_qkv: expected the shapes"):
    sliding_window_attention(
      query, key, value, **options, global_qkv=(query, *shorter)
    )
  with pytest.raises(ValueError, match=r"^window: expected"):
    sliding_window(window=-2)
  with pytest.raises(ValueError, match=r"^dilation: expected"):
    sliding_window(window=2, dilation=(1, 0))
