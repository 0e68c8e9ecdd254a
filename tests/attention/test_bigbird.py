"""BigBird attention beyond the contract: blocks in any order, and its draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  bigbird,
  bigbird_attention,
  bigbird_random_blocks,
  definitions,
)
from attention.testing import Case
from tests.attention.calls import assert_defined, assert_dropout, draw
from tests.refusals import assert_refused


def any_blocks(blocks, slots):
  """Random blocks without any order: repeated, near, global and none."""
  shape = 4, max(blocks - 2, 0), slots
  rng = np.random.default_rng(0)
  return jnp.asarray(rng.integers(-1, blocks + 1, shape, np.int32))


draw_blocks = jax.jit(
  bigbird_random_blocks,
  static_argnames=("num_heads", "num_blocks", "num_random"),
)


@pytest.mark.parametrize(
  ("length", "block_size", "slots"), [(7, 4, 2), (31, 3, 4)]
)
def test_equals_the_definition(length, block_size, slots):
  """On a CPU and on a GPU."""
  arrays, options = Case(("mask", "segments"), length=length).draw()
  options["random_blocks"] = any_blocks(-(-length // block_size), slots)
  options["block_size"] = block_size
  assert_defined(
    lambda qkv: bigbird_attention(*qkv, **options),
    lambda qkv: definitions.bigbird_attention(*qkv, **options),
    arrays,
    where=("cpu", "gpu"),
  )


def test_dropout_drops_weights():
  """No two of the blocks whose window is whole share their draws."""
  random_blocks = any_blocks(10, 3)
  kept = assert_dropout(
    functools.partial(
      bigbird_attention, block_size=4, random_blocks=random_blocks
    ),
    *draw(39),
  )
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
  qkv = draw(29)
  sizes = {"num_heads": 4, "num_blocks": 8, "num_random": 1}
  drawn = np.asarray(draw_blocks(jax.random.key(3), **sizes))
  apply = jax.jit(functools.partial(attention.apply, variables))
  out = apply(*qkv)
  same = apply(*qkv, random_blocks=drawn)
  np.testing.assert_allclose(out, same, atol=1e-6)
  none = apply(*qkv, random_blocks=np.full_like(drawn, -1))
  assert np.abs(out - none).max() > 1e-3


def test_what_does_not_fit_is_refused(unchecked):
  qkv, blocks = draw(9), np.zeros((4, 1, 1), np.int32)
  given = {"block_size": 4, "random_blocks": blocks}
  assert_refused(
    lambda **change: bigbird_attention(*qkv, **given | change),
    {"block_size": 0},
    {"block_size": 2.0},
    {"random_blocks": np.repeat(blocks, 3, axis=1)},
    {"random_blocks": blocks[:2]},
    {"random_blocks": blocks[0]},
    {"random_blocks": blocks.astype(np.float32)},
    ("key_segment_ids", {"query_segment_ids": np.zeros((2, 9), int)}),
    {"is_causal": True},
    {"dropout_rate": 1.0},
    ("dropout_rng", {"dropout_rate": 0.1}),
  )
  assert_refused(bigbird, {"block_size": 0}, {"num_random": -1})
  sizes = {"num_heads": 1, "num_blocks": 1, "num_random": 0}
  assert_refused(
    lambda **size: bigbird_random_blocks(jax.random.key(0), **sizes | size),
    *({name: -1} for name in sizes),
  )
