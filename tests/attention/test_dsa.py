"""DeepSeek's sparse attention: ties, the future, the indexer's loss, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  definitions,
  dense_attention,
  dsa,
  dsa_attention,
  dsa_indexer_loss,
  indexer,
)
from attention.plug import Dims
from tests.attention.test_lse import check, lse_of

LENGTH = 150
TOP_K = 7


def draw(length=LENGTH, heads=3):
  """Query, key, value, and the arrays of an indexer."""
  rng = np.random.default_rng(0)
  shapes = {
    "query": (4, 8),
    "key": (2, 8),
    "value": (2, 8),
    "index_query": (heads, 5),
    "index_key": (5,),
    "index_weight": (heads,),
  }
  arrays = {
    name: jnp.asarray(rng.standard_normal((2, length, *shape)), jnp.float32)
    for name, shape in shapes.items()
  }
  return [arrays.pop(x) for x in ("query", "key", "value")], arrays


def options():
  """A mask that empties the second example, and segments."""
  rng = np.random.default_rng(1)
  mask = jnp.asarray(rng.random((2, 1, 1, LENGTH)) < 0.8).at[1].set(False)
  ids = jnp.asarray(np.arange(LENGTH)[None] // 60 * np.ones((2, 1), int))
  return {"mask": mask, "query_segment_ids": ids, "key_segment_ids": ids}


def selected(index, top_k=TOP_K):
  places = jnp.arange(LENGTH)[None]
  rows = indexer.Rows(
    index["index_query"], index["index_weight"], None, place=places
  )
  keys = indexer.Keys(index["index_key"], None, None)
  return indexer.chosen(indexer.index_scores(rows, keys, True), top_k)


def test_the_largest_are_those_of_a_sort():
  rng = np.random.default_rng(0)
  scores = rng.standard_normal((2, 7, 45)).astype(np.float32)
  scores[0] = np.round(scores[0])  # Many are equal.
  scores[1, :, ::3] = -np.inf
  scores[1, 0] = -np.inf
  scores[1, 1, 1:3] = 3e38, -3e38
  for top_k in (1, 2, 16, 44, 45):
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    expected = np.zeros(scores.shape, bool)
    np.put_along_axis(expected, order, True, axis=-1)
    expected &= scores > -np.inf
    got = indexer.chosen(jnp.asarray(scores), top_k)
    np.testing.assert_array_equal(got, expected, str(top_k))


def test_of_equal_scores_the_earlier_key_is_taken():
  _, index = draw()
  for weight in (0.0, -0.0):
    # Relu gives zeros of both signs.
    index["index_weight"] = weight * index["index_weight"]
    got = np.asarray(selected(index))
    positions = np.arange(LENGTH)
    expected = (positions < TOP_K) & (positions <= positions[:, None])
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


def test_the_future_changes_no_selection():
  _, index = draw()
  before = jax.jit(selected)(index)
  late = jnp.arange(LENGTH) > 77
  changed = {
    name: jnp.where(late.reshape(1, -1, *[1] * (x.ndim - 2)), 30.0, x)
    for name, x in index.items()
  }
  after = jax.jit(selected)(changed)
  np.testing.assert_array_equal(before[:, :78], after[:, :78])
  assert (np.asarray(before[:, 78:]) != np.asarray(after[:, 78:])).any()


@pytest.mark.parametrize("top_k", [TOP_K, LENGTH])
def test_definition_of_both_directions(top_k):
  qkv, index = draw()
  for more in ({"is_causal": True}, {"is_causal": False, **options()}):
    call = {**index, **more, "top_k": top_k}
    got = jax.jit(partial(dsa_attention, **call))(*qkv)
    expected = definitions.dsa_attention(*qkv, **call)
    np.testing.assert_allclose(got, expected, atol=2e-6)
  if top_k == LENGTH:
    np.testing.assert_allclose(got, dense_attention(*qkv, **more), atol=2e-6)


def test_lse_is_that_of_the_keys_selected():
  (query, key, value), index = draw()
  mask = options()["mask"]
  call = partial(dsa_attention, **index, top_k=TOP_K, is_causal=False)
  identity = jnp.eye(LENGTH)[None, :, None]
  identity = jnp.broadcast_to(identity, (2, LENGTH, 2, LENGTH))
  shown = call(query, key, identity, mask=mask) > 0
  check(call, partial(lse_of, shown=shown), query, key, value, mask)


@pytest.mark.parametrize("top_k", [None, TOP_K])
def test_loss(top_k):
  (query, key, _), index = draw()
  for more in ({}, {"is_causal": False, **options()}):
    call = {**index, **more, "top_k": top_k}
    got = jax.jit(partial(dsa_indexer_loss, **call))(query, key)
    expected = definitions.dsa_indexer_loss(query, key, **call)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)
  assert not np.any(got[1])
  assert got[0].min() > -1e-6


@pytest.mark.parametrize("top_k", [None, TOP_K])
def test_gradients_of_the_loss_reach_the_indexer_alone(top_k):
  """They are those of a difference of the definition, along some direction."""
  (query, key, _), index = draw(20)
  call = {"top_k": top_k, "scale": 0.7}

  def total(query, key, index):
    return jnp.sum(dsa_indexer_loss(query, key, **index, **call))

  gradients = jax.jit(jax.grad(total, (0, 1, 2)))(query, key, index)
  *attention, gradient = gradients
  assert not any(np.any(x) for x in attention)
  rng = np.random.default_rng(2)
  for name, x in index.items():
    along = rng.standard_normal(x.shape)
    ends = []
    for step in (1e-5, -1e-5):
      moved = {**index, name: np.asarray(x, np.float64) + step * along}
      loss = definitions.dsa_indexer_loss(query, key, **moved, **call)
      ends.append(loss.sum() / 2e-5)
    slope = np.vdot(along, np.asarray(gradient[name], np.float64))
    np.testing.assert_allclose(slope, ends[0] - ends[1], rtol=1e-3)


def test_padding_may_hold_anything():
  (query, key, value), index = draw()
  call = {"mask": options()["mask"], "is_causal": True, "top_k": TOP_K}
  hidden = ~call["mask"][:, 0, 0]

  def total(index, key, value):
    out = dsa_attention(query, key, value, **index, **call)
    return jnp.sum(out**2) + jnp.sum(
      dsa_indexer_loss(query, key, **index, **call)
    )

  arrays = {"index": index["index_key"], "key": key, "value": value}
  spoiled = {
    name: jnp.where(
      hidden.reshape(*hidden.shape, *[1] * (x.ndim - 2)), np.nan, x
    )
    for name, x in arrays.items()
  }
  run = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
  results = [
    run({**index, "index_key": x["index"]}, x["key"], x["value"])
    for x in (arrays, spoiled)
  ]
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_the_record_trains_its_indexer_by_its_loss_alone():
  mechanism = dsa(top_k=TOP_K, num_index_heads=3, index_dim=8)
  qkv, _ = draw()
  inputs = qkv[0].reshape(2, LENGTH, -1)
  variables = mechanism.init(jax.random.key(0), Dims(4, 2, 8, LENGTH, 32))

  def result(function, inputs, variables):
    read = mechanism.gates(variables, inputs)
    return jnp.sum(function(variables, *qkv, is_causal=True, **read) ** 2)

  def loss(variables, query, key, value, **call):
    del value
    return mechanism.loss(variables, query, key, **call)

  for function, is_trained in ((mechanism.apply, False), (loss, True)):
    gradient = jax.jit(jax.grad(partial(result, function), (0, 1)))(
      inputs, variables
    )
    assert not np.any(gradient[0])
    for x in jax.tree.leaves(gradient[1]):
      assert np.any(x) == is_trained


@pytest.mark.parametrize("top_k", [None, 16])
def test_memory_is_linear(top_k):
  def temporaries(length):
    qkv, index = draw(length, heads=2)

    def total(qkv, index):
      loss = dsa_indexer_loss(*qkv[:2], **index, top_k=top_k)
      out = dsa_attention(*qkv, **index, top_k=16)
      return jnp.sum(loss) + jnp.sum(out)

    compiled = jax.jit(jax.grad(total, (0, 1))).lower(qkv, index).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(4096) < 2.3 * temporaries(2048)
