"""DeepSeek's sparse attention: ties, the future, the indexer's loss, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, dsa, dsa_attention, dsa_indexer_loss
from attention.mechanism import Dims
from attention.softmax import indexer
from tests.attention.calls import assert_defined, normal
from tests.attention.test_lse import check, of_pairs, weights_of
from tests.attention.test_selected_blocks import LENGTH, options

TOP_K = 7
SHAPES = {
  "query": (4, 8),
  "key": (2, 8),
  "value": (2, 8),
  "index_query": (3, 5),
  "index_key": (5,),
  "index_weight": (3,),
}


def draw(length=LENGTH):
  """Query, key, value, and the arrays of an indexer."""
  arrays = normal(*((2, length, *shape) for shape in SHAPES.values()))
  return arrays[:3], dict(zip([*SHAPES][3:], arrays[3:], strict=True))


@jax.jit
def selected(index):
  places = jnp.arange(LENGTH)[None]
  rows = indexer.Rows(
    index["index_query"], index["index_weight"], None, place=places
  )
  keys = indexer.Keys(index["index_key"], None, None)
  return indexer.select(indexer.index_scores(rows, keys, True), TOP_K)


def test_the_largest_are_those_of_a_sort():
  rng = np.random.default_rng(0)
  scores = rng.standard_normal((2, 7, 45)).astype(np.float32)
  scores[0] = np.round(scores[0])  # Many are equal.
  scores[1, :, ::3] = -np.inf
  scores[1, 0] = -np.inf
  scores[1, 1, 1:3] = 3e38, -3e38
  for top_k in (1, 16, 45):
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :top_k]
    expected = np.zeros(scores.shape, bool)
    np.put_along_axis(expected, order, True, axis=-1)
    expected &= scores > -np.inf
    got = jax.jit(indexer.select, static_argnums=1)(scores, top_k)
    np.testing.assert_array_equal(got, expected, str(top_k))


def test_of_equal_scores_the_earlier_key_is_taken():
  _, index = draw()
  positions = np.arange(LENGTH)
  expected = (positions < TOP_K) & (positions <= positions[:, None])
  for weight in (0.0, -0.0):
    # Relu gives zeros of both signs.
    zeros = np.full((2, LENGTH, 3), weight, np.float32)
    got = selected(index | {"index_weight": zeros})
    np.testing.assert_array_equal(got, np.broadcast_to(expected, got.shape))


def test_with_room_for_all_keys_it_is_dense():
  qkv, index = draw()
  for more in ({"is_causal": True}, {"is_causal": False, **options()}):
    got = dsa_attention(*qkv, **index, **more, top_k=LENGTH)
    expected = definitions.dense_attention(*qkv, **more)
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_lse_is_that_of_the_keys_selected():
  qkv, index = draw()
  call = {
    **index,
    "top_k": TOP_K,
    "is_causal": False,
    "mask": options()["mask"],
  }
  shown = weights_of(definitions.dsa_attention, *qkv[:2], **call) > 0
  check(partial(dsa_attention, **call), partial(of_pairs, shown=shown), *qkv)


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
  (query, key, _), index = draw(20)
  call = {"top_k": top_k, "scale": 0.7}

  def total(query, key, index):
    return jnp.sum(dsa_indexer_loss(query, key, **index, **call))

  gradients = jax.jit(jax.grad(total, (0, 1, 2)))(query, key, index)
  assert not any(np.any(x) for x in gradients[:2])
  assert_defined(
    lambda index: dsa_indexer_loss(query, key, **index, **call),
    lambda index: definitions.dsa_indexer_loss(query, key, **index, **call),
    index,
    tolerance=2e-5,
  )


def test_a_hidden_query_may_hold_anything_for_the_loss():
  mechanism = dsa(top_k=TOP_K, num_index_heads=3, index_dim=8)
  (query, key, _), _ = draw()
  inputs, dims = query.reshape(2, LENGTH, -1), Dims(4, 2, 8, LENGTH, 32)
  variables = jax.jit(lambda key: mechanism.init(key, dims))(jax.random.key(0))
  gates = mechanism.gates(variables, inputs)
  call = {"mask": options()["mask"], "is_causal": True}
  loss = jax.jit(partial(mechanism.loss, variables, **call))
  expected = loss(query, key, **gates)
  hidden = ~np.asarray(call["mask"])[:, 0, 0, :, None, None]
  np.testing.assert_array_equal(
    loss(jnp.where(hidden, jnp.inf, query), key, **gates), expected
  )


def test_the_record_trains_its_indexer_by_its_loss_alone():
  mechanism = dsa(top_k=TOP_K, num_index_heads=3, index_dim=8)
  qkv, _ = draw()
  inputs = qkv[0].reshape(2, LENGTH, -1)
  dims = Dims(4, 2, 8, LENGTH, 32)
  variables = jax.jit(lambda key: mechanism.init(key, dims))(jax.random.key(0))

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


def test_memory_is_linear():
  """Of attention, and of the loss over all keys and over the selected."""

  def temporaries(length):
    arrays = {
      name: jax.ShapeDtypeStruct((1, length, *shape), jnp.float32)
      for name, shape in SHAPES.items()
    }

    def total(arrays):
      index = {name: arrays[name] for name in [*SHAPES][3:]}
      query, key, value = (arrays[name] for name in [*SHAPES][:3])
      losses = [
        jnp.sum(dsa_indexer_loss(query, key, **index, top_k=top_k))
        for top_k in (None, 16)
      ]
      out = dsa_attention(query, key, value, **index, top_k=16)
      return sum(losses) + jnp.sum(out)

    compiled = jax.jit(jax.grad(total)).lower(arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporaries(4096) < 2.3 * temporaries(2048)
