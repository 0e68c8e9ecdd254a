"""Indexers of blocks: definitions, transformers' indexers, padding, the future."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  compressed_entries,
  definitions,
  dense_attention,
  dsa_attention,
  moba_attention,
)
from tests.attention.test_compressed import (
  assert_padded_alike,
  mask_of,
  normal,
  witness,
)
from tests.refusals import assert_refused

LENGTH, SIZE = 17, 3


def draw(heads=3):
  """Query, key and value, and index arrays with a key for each position."""
  rng = np.random.default_rng(0)
  shapes = (4, 8), (2, 8), (2, 5)
  qkv = [normal(rng, 2, LENGTH, *shape) for shape in shapes]
  return qkv, {
    "index_query": normal(rng, 2, LENGTH, heads, 6),
    "index_key": normal(rng, 2, LENGTH, 6),
  }


def weighted(index):
  """The same, with weights and a key for each whole block."""
  weight = normal(np.random.default_rng(1), 2, LENGTH, 3)
  key = index["index_key"][:, : LENGTH // SIZE]
  return index | {"index_key": key, "index_weight": weight}


@pytest.mark.parametrize("left", [None, False, True])
def test_blocks_of_dsa_are_their_definition(left):
  qkv, index = draw()
  call = weighted(index)
  if left is not None:
    call["mask"] = mask_of((11, 17), left)
  sizes = {"top_k": 2, "index_block_size": SIZE}
  expected = definitions.dsa_attention(*qkv, **call, **sizes)
  out = jax.jit(partial(dsa_attention, **sizes))(*qkv, **call)
  np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("left", [None, False, True])
def test_blocks_of_moba_are_their_definition(heads, left):
  qkv, call = draw(heads)
  if left is not None:
    call["mask"] = mask_of((11, 17), left)
  for local in (0, 1, 2):
    sizes = {"top_k": 3, "block_size": SIZE, "local_blocks": local}
    expected = definitions.moba_attention(*qkv, **call, **sizes)
    out = jax.jit(partial(moba_attention, **sizes))(*qkv, **call)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize("name", ["dsa", "moba"])
def test_padding_on_either_side(name):
  qkv, index = draw(2)
  if name == "dsa":
    sizes = {"top_k": 2, "index_block_size": SIZE}
    weight = normal(np.random.default_rng(1), 2, LENGTH, 2)
    arrays = *qkv, index["index_query"], index["index_key"], weight
  else:
    sizes = {"top_k": 2, "block_size": SIZE}
    arrays = *qkv, *index.values()

  @jax.jit
  def run(arrays, mask):
    *qkv, a, b = arrays[:5]
    call = {"index_query": a, "index_key": b, "mask": mask, **sizes}
    if name == "moba":
      return moba_attention(*qkv, **call)
    zeros = jnp.zeros((2, LENGTH, 1, 6)), jnp.zeros((SIZE, 1, 6))
    b = compressed_entries(b[:, :, None], *zeros, keep=mask[:, 0, 0])
    call |= {"index_key": b, "index_weight": arrays[5]}
    return dsa_attention(*qkv, **call)

  assert_padded_alike(lambda *x: np.asarray(run(*x)), arrays)


def test_means_of_qwen():
  """Keys are means of blocks; scores are sums over the heads."""
  x = witness("qwen")
  shape = x["rows"].shape
  zeros = np.zeros((*shape[:2], 1, shape[2]), np.float32)
  pooled = compressed_entries(x["rows"][:, :, None], zeros, zeros[0, :4])
  np.testing.assert_allclose(pooled, x["pooled"], atol=1e-6)
  ones = np.ones(x["index_query"].shape[:3], np.float32)
  index = {"index_query": x["index_query"], "index_key": x["index_key"]}
  assert_selected(x["selected"], 4, {**index, "index_weight": ones})


def test_pools_of_glm():
  """With padding on the right in one row, and on the left in the other."""
  x = witness("glm")
  keep = x["keep"] > 0
  rows, gates = x["rows"][:, :, None], x["gates"][:, :, None]
  index = {name: y for name, y in x.items() if name.startswith("index_")}
  index["index_key"] = compressed_entries(
    rows, gates, x["bias"][:, None], keep=keep
  )
  assert_selected(x["selected"], 3, index, keep)


def assert_selected(selected, size, index, keep=None):
  """Attention is that to the selected keys, two blocks and the open one."""
  rng = np.random.default_rng(0)
  batch, length = selected.shape[:2]
  qkv = [normal(rng, batch, length, 2, 6) for _ in range(3)]
  mask = None if keep is None else keep[:, None, None]
  out = dsa_attention(*qkv, **index, top_k=2, index_block_size=size, mask=mask)
  expected = dense_attention(*qkv, mask=selected[:, None] > 0)
  shown = np.ones((batch, length), bool) if keep is None else keep
  np.testing.assert_allclose(out[shown], expected[shown], atol=1e-6)
  # The selection matters.
  more = dsa_attention(*qkv, **index, top_k=3, index_block_size=size, mask=mask)
  assert np.abs(more - expected)[shown].max() > 0.1


def test_what_does_not_fit_is_told(unchecked):
  qkv, index = draw()
  ids = np.zeros((2, LENGTH), np.int32)
  call = weighted(index) | {"top_k": 2, "index_block_size": SIZE}
  assert_refused(
    lambda **changes: dsa_attention(*qkv, **call | changes),
    ("index_key", {"index_key": index["index_key"]}),
    ("index_block_size", {"query_segment_ids": ids, "key_segment_ids": ids}),
    ("index_block_size", {"is_causal": False}),
  )
  call = index | {"top_k": 2, "block_size": SIZE}
  assert_refused(
    lambda **changes: moba_attention(*qkv, **call | changes),
    {"index_query": None},
    ("index_query", {}),  # Three index heads of four heads.
    (
      "local_blocks",
      {"index_query": None, "index_key": None, "local_blocks": 2},
    ),
  )
