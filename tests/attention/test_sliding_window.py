"""Sliding-window attention against its definition, in values and gradients.

Blocks are 8 queries long here instead of 64, so that short sequences already
run over several blocks, a shifted last one and clipped key slices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  attention_weights,
  sliding_window_attention,
)
from attention.definitions.sliding_window import attended_pairs
from tests.attention.forms import thorough
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


@pytest.mark.parametrize(
  ("length", "source", "window", "dilation", "names"),
  [
    (7, 7, 8, 3, "segments global"),
    (31, 31, (5, 1), 1, "mask segments"),
    (31, 31, 3, 1, "causal " + ALL),
    (31, 31, 2, (5, 1, 1, 5), "causal " + ALL),
    (5, 37, 3, 1, ""),
    (37, 5, 2, (2, 2, 1, 3), "mask segments causal"),
    *thorough(
      (1, 1, 0, 2, "causal global"),
      (7, 7, 0, 1, "mask"),
      (8, 8, 3, 1, "global"),
      (31, 31, 3, 1, ""),
      (31, 31, (0, 4), 2, "mask global"),
      (16, 16, 9, 40, "global"),
      (11, 23, (1, 3), 2, "causal mask"),
    ),
  ],
)
def test_equals_the_definition(length, source, window, dilation, names):
  *qkv, cotangent = draw_inputs(length, source)
  options = draw_options(names, length, source)
  check_definition(qkv, cotangent, window=window, dilation=dilation, **options)


def test_the_matrix_of_separate_global_projections_has_rows_of_weights():
  query, key, *_ = (jnp.asarray(x) for x in draw_inputs(7))
  own = tuple(jnp.asarray(x) for x in draw_inputs(7, seed=5)[:3])
  attend = functools.partial(sliding_window_attention, window=1)
  weights = attention_weights(
    attend, query, key, global_indices=jnp.array([[2], [-1]]), global_qkv=own
  )
  np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-5)
  assert (weights[0, :, :, 2] > 0).all()
  assert (weights[0, :, 2] > 0).all()


@pytest.mark.parametrize(
  ("names", "dilation"),
  [*thorough(("global", 1)), ("causal " + ALL, 2)],
)
def test_separate_global_projections(names, dilation):
  *qkv, cotangent = draw_inputs(19)
  global_qkv = tuple(draw_inputs(19, seed=5)[:3])
  options = draw_options(names, 19, 19)
  check_definition(
    qkv,
    cotangent,
    window=2,
    dilation=dilation,
    global_qkv=global_qkv,
    **options,
  )


@pytest.mark.parametrize(("kv_heads", "dilation"), [(1, (1, 2, 2, 2))])
def test_grouped_heads(kv_heads, dilation):
  *qkv, cotangent = draw_inputs(21, kv_heads=kv_heads)
  options = draw_options("mask global", 21, 21)
  check_definition(qkv, cotangent, window=3, dilation=dilation, **options)


@pytest.mark.parametrize("names", ["causal " + ALL])
def test_bfloat16(names):
  *qkv, cotangent = draw_inputs(31, dtype=jnp.bfloat16)
  options = draw_options(names, 31, 31)
  check_definition(
    qkv, cotangent, tolerance=2e-2, window=4, dilation=2, **options
  )
  attend = functools.partial(sliding_window_attention, window=4)
  assert jax.eval_shape(attend, *qkv).dtype == jnp.bfloat16


@pytest.mark.parametrize("window", [(9, 30), (200, 71)])
def test_blocks_of_the_real_length(monkeypatch, window):
  """Narrow and wide windows have blocks of their own."""
  monkeypatch.undo()
  *qkv, cotangent = draw_inputs(263, heads=2, kv_heads=1, batch=1)
  check_definition(qkv, cotangent, window=window)


@pytest.mark.parametrize("names", ["mask global causal"])
def test_large_logits(names):
  *qkv, cotangent = draw_inputs(31)
  query, key, value = qkv
  options = draw_options(names, 31, 31)
  out, grads = forward_and_gradients(
    (query * 1e2, key * 1e2, value), cotangent, window=3, **options
  )
  for array in (out, *grads):
    assert np.all(np.isfinite(array))


def test_a_query_that_sees_nothing_gets_zeros():
  *qkv, cotangent = draw_inputs(19)
  options = draw_options("global", 19, 19)
  mask = np.ones((2, 1, 1, 19), bool)
  mask[0] = False
  out, grads = forward_and_gradients(
    qkv, cotangent, window=2, mask=mask, **options
  )
  for array in (out, *grads):
    assert np.all(np.isfinite(array))
    assert not np.any(array[0])
    assert np.any(array[1])
  # Queries beyond the keys' last window, without any mask.
  query, key, value, _ = draw_inputs(30, 4)
  attend = jax.jit(functools.partial(sliding_window_attention, window=3))
  out = attend(query, key, value)
  assert not np.any(out[:, 7:])
  assert np.all(np.any(out[:, :7], axis=-1))


@pytest.mark.parametrize("dilation", [1, (1, 2, 3, 3)])
def test_the_future_changes_nothing_at_all(dilation):
  options = draw_options("causal mask segments global", 29, 29)
  options["global_indices"][:, 3] = 28
  attend = jax.jit(
    functools.partial(
      sliding_window_attention, window=4, dilation=dilation, **to_jax(options)
    )
  )
  qkv = draw_inputs(29)[:3]
  changed = [x.at[:, -1].add(30.0) for x in qkv]
  np.testing.assert_array_equal(attend(*qkv)[:, :-1], attend(*changed)[:, :-1])


@pytest.mark.parametrize(
  ("names", "fill"), [("mask", np.nan), ("mask segments causal", 1e30)]
)
def test_masked_keys_are_not_read(names, fill):
  *qkv, cotangent = draw_inputs(29)
  options = draw_options(names, 29, 29)
  hidden = ~options["mask"][:, 0, 0, :, None, None]
  filled = [qkv[0], *(jnp.where(hidden, fill, x) for x in qkv[1:])]
  plain = forward_and_gradients(qkv, cotangent, window=4, **options)
  other = forward_and_gradients(filled, cotangent, window=4, **options)
  jax.tree.map(np.testing.assert_array_equal, plain, other)


def test_masked_global_keys_change_nothing():
  *qkv, cotangent = draw_inputs(29)
  options = draw_options("mask global", 29, 29)
  options["mask"][:, :, :, options["global_indices"][0, 0]] = False
  hidden = ~options["mask"][:, 0, 0, :, None, None]
  filled = [qkv[0], *(jnp.where(hidden, 1e30, x) for x in qkv[1:])]
  plain = forward_and_gradients(qkv, cotangent, window=4, **options)
  other = forward_and_gradients(filled, cotangent, window=4, **options)
  jax.tree.map(np.testing.assert_array_equal, plain, other)


def test_weights_are_the_union():
  query, key, _, _ = draw_inputs(17, heads=2, kv_heads=1)
  indices = np.array([[3, 3, -1], [0, 16, 9]])
  attend = functools.partial(
    sliding_window_attention, window=1, global_indices=jnp.asarray(indices)
  )
  weights = jax.jit(functools.partial(attention_weights, attend))(query, key)
  visible = attended_pairs(query, key, window=1, global_indices=indices)
  np.testing.assert_array_equal(np.asarray(weights) > 0, visible)
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)


def test_dropout_drops_weights():
  *qkv, cotangent = draw_inputs(61)
  options = draw_options(ALL, 61, 61)
  attend = functools.partial(
    sliding_window_attention, window=5, dilation=(1, 2, 1, 2), **to_jax(options)
  )
  check_dropout(attend, qkv, cotangent, options.get("scale"))


def test_no_two_blocks_share_their_dropout():
  dilations = (1, 2, 1, 2)
  *qkv, cotangent = draw_inputs(61)
  attend = functools.partial(
    sliding_window_attention, window=5, dilation=dilations
  )
  kept = check_dropout(attend, qkv, cotangent)
  seen = []
  offsets = np.arange(-5, 6)[None]
  for b, n in np.ndindex(2, 4):
    d = dilations[n]
    # Whole blocks of 8 queries of a residue class, and their whole windows.
    for t in range(8 * d, 61 - 13 * d, 8 * d):
      for r in range(d):
        rows = (t + r + d * np.arange(8))[:, None]
        seen.append(kept[b, n][rows, rows + d * offsets].tobytes())
  assert len(set(seen)) == len(seen) > 30
