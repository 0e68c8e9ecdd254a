"""BigBird attention: its laws, its draws and its faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  attention_weights,
  bigbird,
  bigbird_attention,
  bigbird_random_blocks,
  dense_attention,
)
from attention.definitions.bigbird import attended_blocks
from attention.definitions.shared import visible_pairs
from tests.attention.forms import thorough
from tests.attention.window_cases import (
  assert_close,
  attend_densely,
  check_dropout,
  draw_inputs,
  draw_options,
  to_jax,
)


def any_blocks(blocks, slots, seed=0):
  """Random blocks without any order: repeated, near, global and none."""
  rng = np.random.default_rng(seed)
  return rng.integers(-1, blocks + 1, (4, max(blocks - 2, 0), slots), np.int32)


@functools.partial(jax.jit, static_argnames="block_size")
def forward_and_gradients(qkv, cotangent, block_size, **options):
  def attend(*qkv):
    return bigbird_attention(*qkv, block_size=block_size, **options)

  out, pull = jax.vjp(attend, *qkv)
  return out, *pull(cotangent)


@pytest.mark.parametrize(
  ("length", "block_size", "slots", "kv_heads", "names"),
  [
    (7, 4, 2, 4, "mask segments"),
    (31, 3, 4, 1, "mask segments"),
    *thorough((1, 4, 2, 2, ""), (9, 4, 30, 2, ""), (31, 4, 0, 4, "mask")),
  ],
)
def test_equals_the_definition(length, block_size, slots, kv_heads, names):
  *qkv, cotangent = draw_inputs(length, kv_heads=kv_heads)
  options = draw_options(names, length, length)
  random_blocks = any_blocks(-(-length // block_size), slots)
  got = forward_and_gradients(
    tuple(qkv),
    cotangent,
    block_size,
    random_blocks=random_blocks,
    **to_jax(options),
  )
  visible = visible_pairs(*qkv[:2], **options)
  visible &= attended_blocks(length, block_size, random_blocks)
  want = attend_densely(qkv, visible, np.asarray(cotangent, np.float64))
  for x, y in zip(got, (want[0], *want[1]), strict=True):
    assert_close(x, y, 1e-5)


@pytest.mark.parametrize(("length", "slots"), [*thorough((11, 0)), (29, 6)])
def test_all_blocks_are_dense_attention(length, slots):
  *qkv, cotangent = draw_inputs(length)
  blocks = -(-length // 4)
  every = np.arange(slots, dtype=np.int32) + 1
  random_blocks = np.broadcast_to(every, (4, blocks - 2, slots))
  got = forward_and_gradients(
    tuple(qkv), cotangent, 4, random_blocks=random_blocks
  )

  @jax.jit
  def expected(*qkv):
    out, pull = jax.vjp(dense_attention, *qkv)
    return out, *pull(cotangent)

  for x, y in zip(got, expected(*qkv), strict=True):
    assert_close(x, y, 2e-6)


def test_a_query_reads_its_blocks_and_no_other():
  query, key, _, _ = draw_inputs(30)
  random_blocks = any_blocks(8, 2)
  attend = functools.partial(
    bigbird_attention, block_size=4, random_blocks=jnp.asarray(random_blocks)
  )
  weights = jax.jit(functools.partial(attention_weights, attend))(query, key)
  visible = np.broadcast_to(
    attended_blocks(30, 4, random_blocks), weights.shape
  )
  np.testing.assert_array_equal(np.asarray(weights) > 0, visible)
  np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)


@pytest.mark.parametrize(
  ("length", "names"), [*thorough((7, "mask segments")), (39, "")]
)
def test_dropout_drops_weights(length, names):
  *qkv, cotangent = draw_inputs(length)
  attend = functools.partial(
    bigbird_attention,
    block_size=4,
    random_blocks=jnp.asarray(any_blocks(-(-length // 4), 3)),
    **to_jax(draw_options(names, length, length)),
  )
  kept = check_dropout(attend, qkv, cotangent)
  if length == 39:
    # No two of the blocks whose window is whole share their draws.
    seen = [
      kept[b, n, t : t + 4, t - 4 : t + 8].tobytes()
      for b, n in np.ndindex(2, 4)
      for t in range(8, 32, 4)
    ]
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
  ("num_blocks", "num_random"),
  [(1, 2), (3, 1), (9, 8), *thorough((2, 3), (5, 2), (6, 3), (9, 3))],
)
def test_draws_are_distinct_and_not_attended_anyhow(num_blocks, num_random):
  drawn = np.asarray(
    bigbird_random_blocks(
      jax.random.key(1),
      num_heads=50,
      num_blocks=num_blocks,
      num_random=num_random,
    )
  )
  assert drawn.shape == (50, max(num_blocks - 2, 0), num_random)
  assert drawn.dtype == np.int32
  for i in range(1, num_blocks - 1):
    seen = {0, num_blocks - 1, i - 1, i, i + 1}
    candidates = set(range(num_blocks)) - seen
    for row in drawn[:, i - 1]:
      chosen = row[row >= 0].tolist()
      assert len(chosen) == min(num_random, len(candidates))
      assert len(set(chosen)) == len(chosen)
      assert set(chosen) <= candidates
      assert (row[row < 0] == -1).all()


def test_draws_are_uniform():
  draws = 3000
  drawn = bigbird_random_blocks(
    jax.random.key(0), num_heads=draws, num_blocks=12, num_random=3
  )
  for i, rows in enumerate(np.swapaxes(drawn, 0, 1), start=1):
    counts = np.bincount(rows.ravel(), minlength=12)
    candidates = sorted(set(range(12)) - {0, 11, i - 1, i, i + 1})
    expected = 3 * draws / len(candidates)
    # χ² with at most 7 degrees of freedom: above 24.3 once in 1,000.
    assert ((counts[candidates] - expected) ** 2 / expected).sum() < 24.3
    # Pairs as well: sets, not only single blocks, are equally likely.
    pairs = np.zeros((12, 12))
    for a, b in ((0, 1), (0, 2), (1, 2)):
      np.add.at(pairs, tuple(np.sort(rows[:, [a, b]], axis=1).T), 1)
    pairs = pairs[np.ix_(candidates, candidates)]
    pairs = pairs[np.triu_indices(len(candidates), 1)]
    expected = 3 * draws / len(pairs)
    assert ((pairs - expected) ** 2 / expected).sum() < 3 * len(pairs)


def test_heads_and_keys_differ():
  draw = functools.partial(
    bigbird_random_blocks, num_heads=2, num_blocks=1024, num_random=3
  )
  first, second = draw(jax.random.key(0)), draw(jax.random.key(1))
  assert (first != second).mean() > 0.9
  assert (first[0] != first[1]).mean() > 0.9
  np.testing.assert_array_equal(first, draw(jax.random.key(0)))


def test_a_call_may_bring_its_own_blocks():
  attention = bigbird(block_size=4, num_random=1)
  variables = attention.init(jax.random.key(3), None)
  qkv = draw_inputs(29)[:3]
  drawn = bigbird_random_blocks(
    jax.random.key(3), num_heads=4, num_blocks=8, num_random=1
  )
  apply = jax.jit(functools.partial(attention.apply, variables))
  out = apply(*qkv)
  same = apply(*qkv, random_blocks=drawn)
  np.testing.assert_allclose(out, same, atol=1e-6)
  none = apply(*qkv, random_blocks=-jnp.ones_like(drawn))
  assert np.abs(out - none).max() > 1e-3


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("block_size", {"block_size": 0}),
    ("block_size", {"block_size": 2.0}),
    ("random_blocks", {"random_blocks": np.zeros((4, 3, 1), np.int32)}),
    ("random_blocks", {"random_blocks": np.zeros((2, 1, 1), np.int32)}),
    ("random_blocks", {"random_blocks": np.zeros((4, 1), np.int32)}),
    ("random_blocks", {"random_blocks": np.zeros((4, 1, 1), np.float32)}),
    ("mask", {"mask": np.ones((2, 1, 9, 9), bool)}),
    ("key_segment_ids", {"query_segment_ids": np.zeros((2, 9), int)}),
    ("is_causal", {"is_causal": True}),
    ("dropout_rate", {"dropout_rate": 1.0}),
    ("dropout_rng", {"dropout_rate": 0.1}),
  ],
)
def test_errors_name_the_argument(name, options):
  given = {"block_size": 4, "random_blocks": np.zeros((4, 1, 1), np.int32)}
  with pytest.raises(ValueError, match=rf"^{name}: expected .+ got"):
    bigbird_attention(*draw_inputs(9)[:3], **{**given, **options})


@pytest.mark.usefixtures("unchecked")
def test_the_factory_and_the_draw_check_their_sizes():
  with pytest.raises(ValueError, match=r"^block_size: expected"):
    bigbird(block_size=0)
  with pytest.raises(ValueError, match=r"^num_random: expected"):
    bigbird(num_random=-1)
  for name in ("num_heads", "num_blocks", "num_random"):
    sizes = {"num_heads": 1, "num_blocks": 1, "num_random": 0, name: -1}
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
      bigbird_random_blocks(jax.random.key(0), **sizes)
