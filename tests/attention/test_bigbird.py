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
)
from attention.definitions.bigbird import attended_blocks
from attention.definitions.shared import visible_pairs
from attention.platform import backend
from tests.attention.calls import assert_refused
from tests.attention.window_cases import (
  assert_close,
  attend_densely,
  check_dropout,
  draw_inputs,
  draw_options,
)


def any_blocks(blocks, slots, seed=0):
  """Random blocks without any order: repeated, near, global and none."""
  rng = np.random.default_rng(seed)
  return rng.integers(-1, blocks + 1, (4, max(blocks - 2, 0), slots), np.int32)


draw_blocks = jax.jit(
  bigbird_random_blocks,
  static_argnames=("num_heads", "num_blocks", "num_random"),
)


@functools.partial(jax.jit, static_argnames=("block_size", "where"))
def forward_and_gradients(qkv, cotangent, block_size, where, **options):
  def attend(*qkv):
    return bigbird_attention(*qkv, block_size=block_size, **options)

  with backend.tracing_for(where):
    out, pull = jax.vjp(attend, *qkv)
    return out, *pull(cotangent)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize(
  ("length", "block_size", "slots", "kv_heads", "names"),
  [
    (7, 4, 2, 4, "mask segments"),
    (31, 3, 4, 1, "mask segments"),
    (29, 4, 6, 2, ""),
  ],
)
def test_equals_the_definition(
  length, block_size, slots, kv_heads, names, where
):
  """Without options all blocks are read, and so it is dense attention."""
  *qkv, cotangent = draw_inputs(length, kv_heads=kv_heads)
  options = draw_options(names, length, length)
  blocks = -(-length // block_size)
  random_blocks = any_blocks(blocks, slots)
  if not names:
    every = np.arange(slots, dtype=np.int32) + 1
    random_blocks = np.broadcast_to(every, random_blocks.shape)
  options_read = {"random_blocks": random_blocks, **options}
  got = forward_and_gradients(
    tuple(qkv), cotangent, block_size, where, **options_read
  )
  visible = visible_pairs(*qkv[:2], **options)
  read = attended_blocks(length, block_size, random_blocks)
  assert names or read.all()
  want = attend_densely(qkv, visible & read, np.asarray(cotangent, np.float64))
  for x, y in zip(got, (want[0], *want[1]), strict=True):
    assert_close(x, y, 1e-5 if names else 2e-6)


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


def test_dropout_drops_weights():
  *qkv, cotangent = draw_inputs(39)
  attend = functools.partial(
    bigbird_attention,
    block_size=4,
    random_blocks=jnp.asarray(any_blocks(10, 3)),
  )
  kept = check_dropout(attend, qkv, cotangent)
  # No two of the blocks whose window is whole share their draws.
  seen = [
    kept[b, n, t : t + 4, t - 4 : t + 8].tobytes()
    for b, n in np.ndindex(2, 4)
    for t in range(8, 32, 4)
  ]
  assert len(set(seen)) == len(seen)


@pytest.mark.parametrize(
  ("num_blocks", "num_random"), [(1, 2), (3, 1), (5, 2), (9, 8)]
)
def test_draws_are_distinct_and_not_attended_anyhow(num_blocks, num_random):
  sizes = {"num_blocks": num_blocks, "num_random": num_random}
  drawn = np.asarray(draw_blocks(jax.random.key(1), num_heads=50, **sizes))
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
  drawn = draw_blocks(
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
  sizes = {"num_heads": 2, "num_blocks": 1024, "num_random": 3}
  first, second, again = (
    np.asarray(draw_blocks(jax.random.key(seed), **sizes)) for seed in (0, 1, 0)
  )
  assert (first != second).mean() > 0.9
  assert (first[0] != first[1]).mean() > 0.9
  np.testing.assert_array_equal(first, again)


def test_a_call_may_bring_its_own_blocks():
  attention = bigbird(block_size=4, num_random=1)
  variables = attention.init(jax.random.key(3), None)
  qkv = draw_inputs(29)[:3]
  sizes = {"num_heads": 4, "num_blocks": 8, "num_random": 1}
  drawn = np.asarray(draw_blocks(jax.random.key(3), **sizes))
  apply = jax.jit(functools.partial(attention.apply, variables))
  out = apply(*qkv)
  same = apply(*qkv, random_blocks=drawn)
  np.testing.assert_allclose(out, same, atol=1e-6)
  none = apply(*qkv, random_blocks=np.full_like(drawn, -1))
  assert np.abs(out - none).max() > 1e-3


def test_what_does_not_fit_is_refused(unchecked):
  qkv, blocks = draw_inputs(9)[:3], np.zeros((4, 1, 1), np.int32)
  given = {"block_size": 4, "random_blocks": blocks}
  assert_refused(
    lambda **change: bigbird_attention(*qkv, **given | change),
    [
      (f"{name}: expected .+ got", change)
      for name, change in (
        ("block_size", {"block_size": 0}),
        ("block_size", {"block_size": 2.0}),
        ("random_blocks", {"random_blocks": np.repeat(blocks, 3, axis=1)}),
        ("random_blocks", {"random_blocks": blocks[:2]}),
        ("random_blocks", {"random_blocks": blocks[0]}),
        ("random_blocks", {"random_blocks": blocks.astype(np.float32)}),
        ("mask", {"mask": np.ones((2, 1, 9, 9), bool)}),
        ("key_segment_ids", {"query_segment_ids": np.zeros((2, 9), int)}),
        ("is_causal", {"is_causal": True}),
        ("dropout_rate", {"dropout_rate": 1.0}),
        ("dropout_rng", {"dropout_rate": 0.1}),
      )
    ],
  )
  cases = {"block_size": 0, "num_random": -1}
  assert_refused(
    bigbird, [(f"{x}: expected", {x: y}) for x, y in cases.items()]
  )
  sizes = {"num_heads": 1, "num_blocks": 1, "num_random": 0}
  assert_refused(
    lambda **size: bigbird_random_blocks(jax.random.key(0), **sizes | size),
    [(f"{name}: expected", {name: -1}) for name in sizes],
  )
