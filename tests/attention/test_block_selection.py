"""Which blocks MoBA and native sparse attention select, and what is left of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import dense_attention, moba_attention, nsa_attention
from attention.platform import backend
from attention.softmax.block_selection import moba_blocks, nsa_blocks
from tests.attention import calls
from tests.refusals import assert_refused

B, T, N, K, SIZE = 2, 45, 4, 2, 4
draw = partial(calls.draw, T)


PLACES = jnp.broadcast_to(jnp.arange(T)[None], (B, T))


@partial(jax.jit, static_argnums=2)
def moba_selection(query, key, where):
  with backend.tracing_for(where):
    return moba_blocks(query, key, jnp.ones((B, T), bool), PLACES, SIZE, 4)


@partial(jax.jit, static_argnums=2)
def nsa_selection(query, key, where):
  # Compressed keys are every second key, of blocks of two.
  key = key[:, 1::2]
  shown = jnp.ones(key.shape[:2], bool)
  sizes, total = (2, 2, SIZE, 5), -(-T // SIZE)
  with backend.tracing_for(where):
    return nsa_blocks(query, key, shown, PLACES, sizes, total, None)


SELECTIONS = pytest.mark.parametrize(
  "blocks", [moba_selection, nsa_selection], ids=["moba", "nsa"]
)


@SELECTIONS
def test_accelerators_select_the_same_without_a_sort(blocks):
  """Scores of few values, of which many are equal, and one that is no number."""
  query, key, _ = (np.array(np.round(x)) for x in draw())
  query[1, 30, 2, 0] = np.nan
  expected = blocks(query, key, "cpu")
  np.testing.assert_array_equal(blocks(query, key, "gpu"), expected)
  assert "sort" not in blocks.lower(query, key, "gpu").as_text()


@SELECTIONS
def test_of_equal_blocks_the_earlier_is_taken(blocks):
  query, key, _ = draw()
  key = np.broadcast_to(np.asarray(key)[:, :1], key.shape)
  last = np.sort(np.asarray(blocks(query, key, "cpu"))[:, -1])
  expected = [0, 1, 2, 11] if blocks is moba_selection else [0, 1, 2, 10, 11]
  np.testing.assert_array_equal(
    last, np.broadcast_to(expected, (*last.shape[:-1], len(expected)))
  )


@SELECTIONS
def test_a_query_never_lacks_its_own_block(blocks):
  query, key, _ = draw()
  chosen = np.asarray(blocks(query, key, "cpu"))
  own = (np.arange(T) // SIZE)[None, :, None, None]
  assert (chosen == own).any(axis=-1).all()
  assert (chosen <= own).all()
  count = (chosen >= 0).sum(axis=-1)
  most = chosen.shape[-1]
  np.testing.assert_array_equal(
    count, np.broadcast_to(np.minimum(own[..., 0] + 1, most), count.shape)
  )


def nsa(branch, **sizes):
  """One of the three branches alone."""
  weights = jnp.asarray(np.full((K, 4), 0.25, np.float32))
  gates = jnp.asarray(
    np.eye(3, dtype=np.float32)[branch] * np.ones((B, T, N, 1))
  )
  return partial(
    nsa_attention,
    branch_gates=gates,
    key_weights=weights,
    value_weights=weights,
    stride=2,
    **{"block_size": 4, "num_blocks": 3, "window": 5, **sizes},
  )


@pytest.mark.parametrize(
  "call",
  [
    partial(moba_attention, block_size=SIZE, top_k=99),
    nsa(1, num_blocks=99),
    nsa(2, window=T),
  ],
  ids=["moba", "nsa selects", "nsa window"],
)
def test_with_room_for_all_keys_it_is_dense(call):
  got, want = (
    calls.pulled(partial(f, is_causal=True), *draw())
    for f in (call, dense_attention)
  )
  calls.assert_equal(got, want, 1e-5)


def test_what_cannot_be_is_told():
  moba = partial(moba_attention, *draw())
  assert_refused(
    lambda **change: moba(**{"block_size": 4, "top_k": 2} | change),
    {"is_causal": False},
    {"top_k": 0},
  )
  assert_refused(
    lambda **sizes: nsa(0, **sizes)(*draw()),
    ("stride", {"block_size": 5}),
    {"num_blocks": 2},
  )
