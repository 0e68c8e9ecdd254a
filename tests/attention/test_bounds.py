"""What functions and conditions take at their bounds, and refuse beyond them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import ATTENTIONS, Dims
from attention.softmax import visible
from attention.softmax.hashing import lsh_rotations
from attention.softmax.logits import Logits
from attention.softmax.mods import make_block_mask
from attention.softmax.visible import Visible
from tests.refusals import assert_refused

KEY = jax.random.key(0)
X = jnp.ones((2, 6, 4, 8))
KV = jnp.ones((2, 6, 2, 8))
QKV = {"query": X, "key": KV, "value": KV}
dense = functools.partial(attention.dense_attention, X)
flash = functools.partial(attention.flash_attention, **QKV)


def below(b, n, t, s):
  del b, n
  return s < t


def test_conditions_of_pairs(unchecked):
  keep = jnp.ones((2, 6), bool)
  assert_refused(
    visible.key_mask,
    *(("key_mask", {"mask": x}) for x in (keep[:, None], keep * 1, keep[0])),
  )
  pairs = keep[:, None, None]
  assert_refused(
    visible.pair_mask,
    *(("pair_mask", {"mask": x}) for x in (keep, pairs[0], pairs * 1.0)),
  )
  sides = (-1, 0), (0, -1), (True, 0), (1.5, 0)
  windows = (dict(zip(("left", "right"), x, strict=True)) for x in sides)
  assert_refused(visible.window, *(("window", x) for x in windows))
  assert visible.window(0, None) == Visible(left=0)
  assert visible.window(np.int64(2), np.int32(0)) == Visible(left=2, right=0)
  of_6 = make_block_mask(below, length=6, block_size=2)
  both = visible.mask_mod(below, of_6)
  for joined in (both & Visible(left=2), Visible(left=2) & both):
    assert joined.block_mask is of_6
  assert_refused(
    lambda **options: dense(KV, KV, **options),
    *({"visible": 3}, {"logits": 3}),
    ("scale", {"logits": Logits(), "scale": 2.0}),
    ("sinks", {"logits": Logits(), "sinks": jnp.zeros(4)}),
  )


def test_masks_of_blocks(unchecked):
  make = functools.partial(make_block_mask, below)
  names = "batch", "num_heads", "length", "source_length", "block_size"
  assert_refused(
    lambda **x: make(**{"length": 6} | x), *({n: 0} for n in names)
  )
  for lengths in ((6, 7), (7, 6), (5, 6)):
    other = make(**dict(zip(("length", "source_length"), lengths, strict=True)))
    assert_refused(
      flash,
      {"block_mask": other, "mask_mod": below},
      ("block_mask", {"visible": visible.mask_mod(below, other)}),
    )
  # Of a condition that nothing meets, one empty block is kept.
  nothing = make_block_mask(
    lambda b, n, t, s: s < t - 9, length=6, block_size=3
  )
  assert nothing.visited.shape == (2, 1)
  assert nothing.share == 0.0
  # Of 3 · 2 tiles, those with s < t: 1, 2 and 2.
  assert make(length=6, source_length=4, block_size=(2, 2)).share == 5 / 6


def test_global_tokens(unchecked):
  call = {"window": 2, "global_indices": jnp.zeros((2, 1), int)}
  attend = functools.partial(attention.sliding_window_attention, X)
  tables = {"relative_bias": (4, 7), "relative_keys": (7, 8)}
  tables |= {"relative_queries": (7, 8)}
  assert_refused(
    lambda **change: attend(KV, KV, **call | change),
    *(("global_indices", {n: jnp.zeros(x)}) for n, x in tables.items()),
    *(
      ("global_qkv", {"global_qkv": x})
      for x in ((X[:, :3], KV, KV), (X, KV[:, :3], KV), (X, KV, KV[..., :3]))
    ),
  )
  for length in (5, 7):
    kv = jnp.ones((2, length, 2, 8))
    assert_refused(lambda kv=kv: attend(kv, kv, **call), ("global_indices", {}))
  none = attend(KV, KV, window=2, global_indices=jnp.zeros((2, 0), int))
  np.testing.assert_array_equal(none, attend(KV, KV, window=2))


def test_arrays_that_are_drawn():
  blocks = functools.partial(attention.bigbird_random_blocks, KEY)
  least = {"num_heads": 1, "num_blocks": 1, "num_random": 0}
  assert blocks(**least).shape == (1, 0, 0)
  assert_refused(
    lambda **change: blocks(**least | change),
    *({"num_heads": 0}, {"num_blocks": 0}, {"num_random": -1}),
  )
  sizes = {"num_rounds": 1, "head_dim": 1, "num_buckets": 2}
  assert lsh_rotations(KEY, **sizes).shape == (1, 1, 1)
  assert_refused(
    lambda **change: lsh_rotations(KEY, **sizes | change),
    *({"num_rounds": 0}, {"head_dim": 0}, {"num_buckets": 3}),
  )
  for sizes in ((0, 4), (4, 0)):
    name = "num_features" if not sizes[0] else "head_dim"
    assert_refused(
      lambda sizes=sizes: attention.orthogonal_features(KEY, *sizes), (name, {})
    )


def test_projections_and_selections(unchecked):
  project = functools.partial(attention.linformer_attention, **QKV)
  assert project(key_projection=jnp.ones((6, 3))).shape == X.shape
  six = {"key_projection": jnp.ones((6, 3))}
  assert_refused(
    project,
    *({"key_projection": jnp.ones(x)} for x in ((5, 3), (1, 6, 3), (3, 6, 3))),
    *(
      ("value_projection", six | {"value_projection": jnp.ones((6, rank))})
      for rank in (2, 4)
    ),
  )
  select = functools.partial(attention.selected_attention, **QKV, block_size=2)
  for groups in (1, 2, 4):
    assert select(block_indices=jnp.zeros((2, 6, groups, 1), int)).any()
  assert_refused(
    select,
    *({"block_indices": jnp.zeros((2, 6, *x), int)} for x in ((3, 1), (1, 0))),
  )
  hash_rows = functools.partial(attention.lsh_attention, X, KV, chunk_size=2)
  assert_refused(hash_rows, {"rotations": jnp.zeros((0, 8, 2))})
  pool = functools.partial(attention.compressed_attention, **QKV, window=2)
  assert pool(stride=2, entries=KV[:, :3]).shape == X.shape
  assert_refused(pool, ("entries", {"stride": 2, "entries": KV[:, :4]}))


@pytest.mark.parametrize(
  ("name", "option", "most"),
  [("linformer", "rank", 16), ("sliding_window", "window", 15),
   ("window_linear", "window", 15)],
)  # fmt: skip
def test_sizes_that_a_longest_sequence_bounds(name, option, most):
  dims = Dims(2, 2, 4, 16)
  ATTENTIONS[name](**{option: most}).init(KEY, dims)
  with pytest.raises(ValueError, match=f"^{option}: "):
    ATTENTIONS[name](**{option: most + 1}).init(KEY, dims)
