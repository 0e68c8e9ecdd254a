"""`attend`, the loop of the softmax family: values, lse, gradients, merging."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions
from attention.platform import layout
from attention.softmax import visible
from attention.softmax.logits import Logits
from attention.softmax.rows import merge
from attention.softmax.tiles import attend
from attention.softmax.visible import Visible
from attention.testing import assert_close
from tests.attention import calls

BATCH, HEADS, KV_HEADS, DIM, VALUES = 3, 4, 2, 8, 6
LENGTH = 37


def drawn(length=LENGTH, source=None):
  return calls.draw(length, source, value=VALUES, batch=BATCH)


def near(left, right, length=LENGTH):
  """The pairs of a window `[1, 1, T, T]`."""
  distance = np.arange(length)[None] - np.arange(length)[:, None]
  return jnp.asarray((distance >= -left) & (distance <= right))[None, None]


def cases(length=LENGTH):
  """What the loop takes, and the same as options of dense attention."""
  rng = np.random.default_rng(1)
  bias, sinks, table, keys, queries, gates = calls.normal(
    (1, HEADS, length, length),
    (HEADS,),
    (HEADS, 7),
    (HEADS, 9, DIM),
    (5, DIM),
    (BATCH, length, HEADS),
  )
  gates = {"log_forget": jnp.asarray(-np.abs(gates))}
  tables = {"relative_bias": table, "relative_keys": keys}
  tables["relative_queries"] = queries
  ids = jnp.asarray(np.sort(rng.integers(0, 3, (BATCH, length)), axis=1))
  keep = calls.random_mask(BATCH, length)
  pairs = calls.random_mask(BATCH, 1, length, length, share=0.3)
  causal = {"is_causal": True}
  key_mask = np.asarray(keep)[:, None, None]

  def falls(score, b, n, t, s):
    del b
    return score - 0.1 * (1 + n) * abs(t - s)

  def even(b, n, t, s):
    del n
    return (t + s + b) % 2 == 0

  score = {"score_mod": falls}
  window, mask = visible.window(5, 3), {"mask": near(5, 3)}
  return {
    "mask": (
      visible.key_mask(keep) & visible.pair_mask(pairs),
      {},
      {"mask": key_mask & pairs},
    ),
    "segments": (
      visible.segments(ids, ids) & visible.causal(),
      {},
      {"query_segment_ids": ids, "key_segment_ids": ids, **causal},
    ),
    "window_causal": (
      window & visible.causal() & visible.key_mask(keep),
      {},
      {"mask": mask["mask"] & key_mask, **causal},
    ),
    "window_tables": (window, tables, tables | mask),
    "bias": (
      Visible(),
      {"bias": bias, "scale": 0.3},
      {"bias": bias, "scale": 0.3},
    ),
    "cap_sinks": (
      visible.causal(),
      {"soft_cap": 1.5, "sinks": sinks},
      {"logits_soft_cap": 1.5, "sinks": sinks, **causal},
    ),
    "gates": (visible.causal(), gates, gates | causal),
    "mods": (visible.mask_mod(even), score, {"mask_mod": even, **score}),
    "window_gates": (
      visible.window(5, 0),
      gates | score,
      mask | causal | gates | score,
    ),
  }


CASES = cases()


def pulled(function):
  """The result, lse and gradients."""
  return calls.pulled(lambda *qkv: calls.counted(*function(*qkv)), *drawn())


@pytest.mark.parametrize("name", CASES)
def test_values_are_the_definition_and_do_not_depend_on_the_tiles(name):
  """Of several visits, and of several tiles a step."""
  qkv = drawn()
  sees, logits, options = CASES[name]
  trained = {x: y for x, y in logits.items() if isinstance(y, jax.Array)}
  rest = {x: y for x, y in logits.items() if x not in trained}

  def run(block):
    def of_tree(tree):
      own = Logits(**rest, **tree[1])
      return attend(*tree[0], sees, own, block=block)[0]

    return of_tree

  def define(tree):
    return definitions.dense_attention(*tree[0], **options | tree[1])

  for block, where in (((5, 16), "cpu"), ((8, None), "gpu")):
    more = {"where": (where,), "tolerance": 2e-5}
    calls.assert_defined(run(block), define, (qkv, trained), **more)


def plain(query, key, value, sinks, pairs):
  """(out, lse) by the definition."""
  run = partial(definitions.dense_attention, query, key, mask=pairs)
  share = run(np.ones_like(value), sinks=np.zeros(HEADS))[..., 0]
  return run(value, sinks=sinks), calls.lse_of(share, sinks)


@pytest.mark.parametrize(
  ("sides", "block", "where"),
  [
    (None, (8, 5), "gpu"),
    ((None, 0), (5, 16), "cpu"),
    ((6, 2), (5, 16), "gpu"),
  ],
)
def test_lse_and_its_gradients(sides, block, where):
  """Of out and lse together."""
  arrays = (*drawn(), jnp.asarray(np.linspace(-1, 1, HEADS, dtype=np.float32)))
  sides = sides or (None, None)
  pairs = near(*(LENGTH if x is None else x for x in sides))

  def fast(query, key, value, sinks):
    sees = visible.window(*sides)
    return attend(query, key, value, sees, Logits(sinks=sinks), block=block)

  calls.assert_defined(
    lambda x: fast(*x), lambda x: plain(*x, pairs), arrays, where=(where,)
  )


def test_rows_that_see_nothing():
  """Zeros, −∞, and no gradient, not even of NaN behind a key mask."""
  query, *kv = map(np.array, drawn(20))
  keep = np.arange(20)[None] >= np.array([[6], [20], [13]])
  for x in kv:
    x[~keep] = np.nan
  sees = visible.key_mask(jnp.asarray(keep)) & visible.causal()

  def loss(*qkv):
    out, lse = attend(*qkv, sees, block=(8, 8))
    return jnp.sum(out) + jnp.sum(jnp.exp(lse)), (out, lse)

  run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
  grads, (out, lse) = jax.device_get(run(query, *kv))
  assert not np.any(out[0, :6])
  assert np.all(np.isneginf(lse[0, :6]))
  assert not np.any(out[1])
  assert np.all(np.isfinite(lse[0, 6:]))
  for grad in grads:
    assert np.all(np.isfinite(grad))
    assert not np.any(grad[1])
    assert not np.any(grad[0, :6])


def test_gradients_of_keys_are_summed_in_float32():
  """64 blocks of queries add to those of a key; in bfloat16 1 % would be lost."""
  draws = calls.normal(*[(1, 512, 1, 4)] * 4)
  arrays = [jnp.asarray(x, jnp.bfloat16) for x in draws]

  def gradients(dtype):
    query, *kv, weights = (x.astype(dtype) for x in arrays)

    def loss(*kv):
      out, _ = attend(query, *kv, block=(8, 512))
      return jnp.sum(out * weights, dtype=jnp.float32)

    return jax.jit(jax.grad(loss, (0, 1)))(*kv)

  expected = gradients(jnp.float32)
  for got, one in zip(gradients(jnp.bfloat16), expected, strict=True):
    assert jnp.linalg.norm(got - one) < 0.004 * jnp.linalg.norm(one)


def test_merge_of_disjoint_keys_is_the_whole():
  keep = calls.random_mask(BATCH, LENGTH, share=0.5)

  def merged(*qkv):
    parts = (visible.causal() & visible.key_mask(m) for m in (keep, ~keep))
    return merge(*(attend(*qkv, part) for part in parts))

  def whole(*qkv):
    return attend(*qkv, visible.causal())

  got, expected = (pulled(f) for f in (merged, whole))
  calls.assert_equal(got, expected, 1e-5)


def test_bands_and_positions():
  """0 ≤ a − b < w of codes; a window of positions that do not start at 0."""
  qkv = drawn(21, 33)
  codes = np.random.default_rng(0).integers(0, 9, (BATCH, 33))
  ours, theirs = jnp.asarray(codes[:, :21]), jnp.asarray(codes)
  sees = Visible(bands=((ours, theirs, 3, True), (ours, theirs, 1, False)))
  apart = codes[:, :21, None] - codes[:, None]
  inside = (apart >= 1) & (apart < 3)
  moved = dataclasses.replace(
    visible.window(24, 0), query_start=40, key_start=20
  )
  distance = np.arange(20, 53)[None] - np.arange(40, 61)[:, None]
  close = (distance >= -24) & (distance <= 0)
  for see, mask, width in (
    (sees, inside[:, None], 8),
    (moved, close[None, None], 8),
    (moved, close[None, None], None),
  ):
    run = jax.jit(lambda *qkv, s=see, w=width: attend(*qkv, s, block=(8, w))[0])
    expected = definitions.dense_attention(*qkv, mask=mask)
    assert_close(run(*qkv), expected, 1e-5)


@pytest.mark.parametrize("starts", [(40, 20), (8, None), (None, 8)])
def test_conditions_are_combined_at_their_positions(starts):
  """In either order; one side alone has positions, or both have the same."""
  query, key, value = drawn(21, 33)
  at = Visible(query_start=starts[0], key_start=starts[1])
  positions = [
    np.arange(size) + (start or 0)
    for size, start in zip((21, 33), starts, strict=True)
  ]
  seen = positions[1][None] <= positions[0][:, None]
  expected = definitions.dense_attention(
    query, key, value, mask=seen[None, None]
  )
  causal = visible.causal()
  for sees in (at & causal, causal & at, (at & causal) & (causal & at)):
    assert (sees.query_start, sees.key_start) == starts
    assert_close(attend(query, key, value, sees)[0], expected, 1e-5)
    # As an argument of a compiled function, and at positions that are traced.
    run = jax.jit(lambda *qkv, sees: attend(*qkv, sees)[0])
    assert_close(run(query, key, value, sees=sees), expected, 1e-5)


def test_functions_caps_and_sides_of_windows_are_static():
  """A program depends on them; arrays and a scale are its arguments."""

  def mod(score, *place):
    return score

  sees = visible.window(5, 3) & visible.mask_mod(mod)
  own = Logits(scale=0.3, soft_cap=2.0, score_mod=mod, sinks=jnp.ones(2))
  assert jax.tree.leaves((sees, own)) == [0.3, own.sinks]


def test_conditions_at_different_positions_are_refused():
  here = visible.causal() & Visible(query_start=16)
  for other in (Visible(query_start=8), Visible(query_start=16, key_start=1)):
    with pytest.raises(ValueError, match=r"^visible: expected both sides of &"):
      here & other
  with pytest.raises(ValueError, match=r"^visible: expected both sides of &"):
    jax.jit(lambda i: (here & Visible(query_start=i)).right)(jnp.int32(16))
  assert (here & Visible(query_start=np.int32(16))).query_start == 16


def test_dropout_is_the_same_for_all_tiles():
  key, sees = jax.random.key(3), visible.window(6, 2)

  def found(block):
    def run(*qkv):
      dropout = {"dropout_rate": 0.4, "dropout_rng": key}
      return attend(*qkv, sees, block=block, **dropout)

    return pulled(run)

  expected = found((37, 37))
  for block in ((8, None), (8, 5)):
    calls.assert_equal(found(block), expected, 1e-5)


@pytest.mark.parametrize(
  ("length", "count", "width", "rows", "begin"),
  [
    (40, 4, 9, 5, 6),  # Inside.
    (40, 4, 10, 5, -7),  # Over the start.
    (40, 4, 13, 5, 18),  # Over the end.
    (12, 4, 11, 4, -9),  # Over both, and the sum is longer than the whole.
    (20, 3, 4, 6, 1),  # Tiles with gaps.
    (16, 3, 8, 4, -40),  # Nowhere near.
    (16, 1, 16, 4, 3),
  ],
)
def test_tiles_are_added_where_they_stand(length, count, width, rows, begin):
  rng = np.random.default_rng(length)
  total = rng.normal(size=(2, length, 3, 4))
  tiles = rng.normal(size=(count, 2, 3, width, 4))
  expected = total.copy()
  for i in range(count):
    wanted = begin + i * rows
    first = min(max(wanted, 0), length - width)
    for j in range(width):
      if wanted <= first + j < wanted + width:
        expected[:, first + j] += tiles[i, :, :, j]
  for function in (
    layout.add_tiles,
    jax.jit(layout.add_tiles, static_argnums=3),
  ):
    found = function(jnp.asarray(total), jnp.asarray(tiles), begin, rows)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("length", [12, 10])
def test_blocks_that_repeat_are_added_without_a_scatter(length):
  rng = np.random.default_rng(length)
  total = rng.normal(size=(2, length, 3, 5))
  tiles = rng.normal(size=(6, 2, 3, 4, 5))
  wanted = np.asarray([2, 0, 2, 3, 7, 0])  # Two of them are of no block.
  tiles[[0, 2], :, :, : 12 - length] = np.nan  # Stand in the block before.
  expected = total.copy()
  for tile, block in zip(tiles, wanted, strict=True):
    for j in range(4):
      if block < 3 and 4 * block + j < length:
        row = j + (12 - length) * (block == 2)
        expected[:, 4 * block + j] += tile[:, :, row]

  arrays = tuple(map(jnp.asarray, (total, tiles, wanted)))
  found = layout.add_blocks(*arrays)
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
  assert "scatter" not in str(jax.make_jaxpr(layout.add_blocks)(*arrays))


@pytest.mark.parametrize("width", [3, 4, 7, 12])
def test_tiles_overlap_and_their_gradients_do_not_scatter(width):
  rng = np.random.default_rng(width)
  rows, count = 4, 3
  x = jnp.asarray(rng.normal(size=((count - 1) * rows + width, 2)))[None]
  pieces = [x[:, i * rows : i * rows + width] for i in range(count)]
  found, pullback = jax.vjp(lambda x: layout.tiles(x, rows, width), x)
  np.testing.assert_array_equal(found, jnp.stack(pieces, axis=1))
  cotangent = jnp.asarray(rng.normal(size=found.shape), found.dtype)
  expected = np.zeros(x.shape)
  for i in range(count):
    expected[:, i * rows : i * rows + width] += cotangent[:, i]
  np.testing.assert_allclose(pullback(cotangent)[0], expected, atol=1e-6)
  assert "scatter" not in str(jax.make_jaxpr(pullback)(cotangent))


# In bfloat16, 256 + 1 is 256.
TERMS = jnp.asarray([256.0] + [1.0] * 8, "bfloat16")


def test_gradients_of_a_repeated_row_are_summed_in_float32():
  x = jnp.zeros((1, 3, 1, 1), "bfloat16")
  index = jnp.asarray([1] * 9 + [3]).reshape(1, 1, 1, 10)
  rows, pullback = jax.vjp(lambda x: layout.head_rows(x, index), x)
  assert rows.dtype == "bfloat16"
  cotangent = jnp.append(TERMS, 7.0).reshape(rows.shape)
  (gradient,) = pullback(cotangent.astype("bfloat16"))
  # The index T reads zeros, so its 7 reaches nothing.
  np.testing.assert_array_equal(gradient.ravel(), [0, 264, 0])


def test_blocks_and_products_of_bfloat16_are_summed_in_float32():
  tiles = TERMS.reshape(9, 1, 1, 1, 1)
  total = jnp.zeros((1, 2, 1, 1))
  added = layout.add_blocks(total, tiles, jnp.ones(9, "int32"))
  np.testing.assert_array_equal(added.ravel(), [0, 264])
  ones = jnp.ones((1, 1, 9, 1), "bfloat16")
  keys = layout.key_dot(ones, TERMS.reshape(1, 1, 9, 1), 1)
  assert keys.dtype == "float32"
  np.testing.assert_array_equal(keys.ravel(), [264])
  logits = layout.query_dot(
    "bkqh,bkdh->bkqd",
    TERMS.reshape(1, 1, 1, 9),
    jnp.ones((1, 1, 1, 9), "bfloat16"),
  )
  assert logits.dtype == "float32"
  np.testing.assert_array_equal(logits.ravel(), [264])
