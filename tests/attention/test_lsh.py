"""LSH attention beyond the contract: its log-sum-exp, hashes, dropout, devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions
from attention.lsh import lsh, lsh_attention, lsh_rotations
from attention.platform import backend
from attention.testing import assert_close
from tests.attention.calls import (
  assert_defined,
  assert_dropout,
  counted,
  pulled,
)
from tests.refusals import assert_refused

B, T, N, K, H, V = 2, 37, 4, 2, 8, 6
CHUNK = 4
both_directions = pytest.mark.parametrize("is_causal", [False, True])


def draw(seed=0, length=T):
  rng = np.random.default_rng(seed)
  query = rng.standard_normal((B, length, N, H), np.float32)
  # Neighbours in time are near in angle, so that chunks look back.
  query[:, 1:] += query[:, :-1]
  value = rng.standard_normal((B, length, K, V), np.float32)
  mask = rng.random((B, 1, 1, length)) < 0.8
  return 2 * query, value, mask


@functools.partial(jax.jit, static_argnums=(0, 1))
def _rotations(num_rounds, num_buckets, key):
  sizes = {"head_dim": H, "num_buckets": num_buckets}
  return lsh_rotations(key, num_rounds=num_rounds, **sizes)


@functools.cache
def rotations(num_rounds=3, num_buckets=4, seed=0):
  return _rotations(num_rounds, num_buckets, jax.random.key(seed))


STATIC = ("chunk_size", "is_causal", "dropout_rate", "return_lse")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend(query, value, rotations, **call):
  call = {"chunk_size": CHUNK, **call}
  return lsh_attention(query, value, rotations=rotations, **call)


def packed(ids, mask=None):
  """Segments, and a mask."""
  mask = np.ones((B, 1, 1, T), bool) if mask is None else mask
  ids = np.asarray(ids, np.int32)
  return {"mask": mask, "query_segment_ids": ids, "key_segment_ids": ids}


def define(query, value, **call):
  """The definition's out, and the log-sum-exp of the logits that it weighs."""
  out = definitions.lsh_attention(query, value, **call)
  identity = np.repeat(np.eye(T)[None, :, None], B, 0)
  weights = definitions.lsh_attention(query, identity, **call)
  norm = np.linalg.norm(query, axis=-1, keepdims=True)
  logits = np.einsum("btnh,bsnh->btns", query, query / norm) / np.sqrt(H)
  lse = np.logaddexp.reduce(np.where(weights > 0, logits, -np.inf), axis=-1)
  return out, lse


@both_directions
def test_the_log_sum_exp_is_that_of_the_definition(is_causal):
  """It is −∞ where a token is masked; ids are in any order, the largest there are."""
  query, value, mask = draw()
  rng = np.random.default_rng(1)
  call = packed(rng.choice(np.int32([-(2**31), 7, 2**31 - 1]), (B, T)), mask)
  call |= {"is_causal": is_causal, "chunk_size": CHUNK}
  more = {"rotations": rotations(), "return_lse": True}
  exact = {"rotations": np.float64(rotations())}
  assert_defined(
    lambda arrays: counted(*lsh_attention(*arrays, **call, **more)),
    lambda arrays: counted(*define(*arrays, **call, **exact)),
    [query, value],
  )


@pytest.mark.parametrize(
  ("chunk_size", "num_buckets", "is_causal"),
  [(1, 2, True), (3, 8, True), (16, 2, False)],
)
def test_any_chunk_size_and_number_of_buckets(
  chunk_size, num_buckets, is_causal
):
  query, value, mask = draw(length=9)
  r = rotations(2, num_buckets)
  call = {"mask": mask, "chunk_size": chunk_size, "is_causal": is_causal}
  expected = definitions.lsh_attention(
    query.astype(np.float64), value, rotations=np.asarray(r, float), **call
  )
  assert_close(attend(query, value, r, **call), expected, 1e-5)


def shared_dense(query, value, is_causal=False):
  """Dense attention of a token to the others, by their directions."""
  length = query.shape[1]
  allowed = ~np.eye(length, dtype=bool)
  if is_causal:
    allowed &= np.tri(length, dtype=bool)
    allowed[0, 0] = True  # It sees no other.
  key = query / np.linalg.norm(query, axis=-1, keepdims=True)
  return definitions.dense_attention(query, key, value, mask=allowed)


@both_directions
def test_one_bucket_and_one_chunk_is_dense(is_causal):
  query, value, _ = draw()
  call = {"is_causal": is_causal, "chunk_size": T}
  got = attend(query, value, rotations(3, 1), **call)
  assert_close(got, shared_dense(query, value, is_causal), 1e-6)


def test_agreement_with_dense_rises_with_rounds():
  query, value, _ = draw(length=64)
  exact = shared_dense(query, value)
  errors = []
  for num_rounds in (1, 2, 4, 8):
    # Drawn again and again: the same hashes and one shape to compile.
    outs = [
      attend(query, value, jnp.tile(r, (8 // num_rounds, 1, 1)))
      for r in (rotations(num_rounds, 8, seed) for seed in range(6))
    ]
    errors.append(np.mean((np.stack(outs) - exact) ** 2))
  assert np.all(np.diff(errors) < 0), errors
  assert errors[-1] < 0.5 * errors[0], errors


@both_directions
def test_vectors_of_zeros(is_causal):
  """Their length is no divisor: results and gradients are finite."""
  query, value, _ = draw()
  query[:, ::3] = 0.0
  for q in (query, np.zeros_like(query)):
    run = functools.partial(attend, rotations=rotations(), is_causal=is_causal)
    for x in jax.tree.leaves(pulled(run, q, value)):
      assert np.isfinite(x).all()


def test_the_plug_draws_rotations_for_its_length():
  def drawn(record, max_length):
    dims = Dims(N, K, H, max_length)
    made = jax.eval_shape(lambda key: record.init(key, dims), jax.random.key(0))
    return made["constants"]["rotations"].shape

  assert drawn(lsh(), 4096) == (4, H, 64)
  assert drawn(lsh(num_rounds=2), 70) == (2, H, 2)
  # More rounds at evaluation are another array of rotations.
  query, value, _ = draw()
  variables = {"constants": {"rotations": rotations(8)}}
  out = jax.eval_shape(lsh().apply, variables, query, None, value)
  assert out.shape == (B, T, N, V)


@both_directions
def test_alone_in_its_segment_a_token_sees_itself(is_causal):
  query, value, _ = draw()
  query[0, 0] = 0.0
  call = {**packed(np.repeat(np.arange(T)[None], B, 0)), "is_causal": is_causal}
  run = functools.partial(
    attend, value=value, rotations=rotations(), return_lse=True, **call
  )
  (out, lse), pull = jax.vjp(run, query)
  (grad,) = pull((jnp.zeros_like(out), jnp.ones_like(lse)))
  np.testing.assert_array_equal(out, np.repeat(value, N // K, 2))
  norm = np.linalg.norm(query, axis=-1)
  np.testing.assert_allclose(lse, norm / np.sqrt(H), rtol=1e-5)
  length = np.where(norm, norm, 1.0)[..., None]
  assert_close(grad, query / length / np.sqrt(H), 1e-6)


@both_directions
def test_dropout_drops_weights(is_causal):
  # With chunks of one token, causal, each sees itself alone.
  call = {"is_causal": is_causal, "chunk_size": 1 if is_causal else 8}

  def of_two(query, key, value, **more):
    del key
    return attend(query, value, rotations(), **call, **more)

  query, value, _ = (x[:1] for x in draw(length=150))
  assert_dropout(of_two, query, value, value)


def test_neither_heads_nor_chunks_share_their_draws():
  length, size = 50, 5
  query = draw(length=length)[0][:1]
  identity = np.eye(length, dtype=np.float32)[None, :, None, :]
  weights = attend(
    query,
    identity,
    rotations(1, 1),
    chunk_size=size,
    dropout_rate=0.5,
    dropout_rng=jax.random.key(3),
  )
  kept = np.moveaxis(np.asarray(weights) != 0, 2, 1)[0]
  # In one bucket the order is that of positions.
  draws = {
    kept[n, start : start + size, start - size : start + size].tobytes()
    for n in range(N)
    for start in range(size, length, size)
  }
  assert len(draws) == N * 9


@pytest.mark.parametrize(
  ("target", "is_causal"), [("cuda", False), ("cuda", True), ("tpu", True)]
)
def test_an_accelerator_takes_a_round_in_one_step(target, is_causal):
  length, num_rounds = 16384, 2
  shape = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)
  r = jnp.zeros((num_rounds, 64, 64))

  def trips(name):
    call = {"rotations": r, "chunk_size": 64, "is_causal": is_causal}

    def run(query, value, cotangent):
      attend = functools.partial(lsh_attention, **call)
      out, pull = jax.vjp(attend, query, value)
      return out, *pull(cotangent)

    with backend.tracing_for(name):
      traced = jax.jit(run).trace(shape, shape, shape)
    found = re.findall(r"\blength=(\d+)", str(traced.jaxpr))
    return traced, sorted(int(n) for n in found)

  traced, found = trips({"cuda": "gpu"}.get(target, target))
  # The hash; the chunks of a round, forward, made again and backward; the rounds.
  assert found == [1, 1, 1, 1, num_rounds, num_rounds]
  traced.lower(lowering_platforms=(target,))
  if target == "cuda":
    assert max(trips("cpu")[1]) >= length // 512


def test_what_does_not_fit_is_refused(unchecked):
  query, value, _ = draw()
  given = {"rotations": rotations(), "chunk_size": CHUNK, "value": value}
  float32, ids = np.float32, np.ones((B, T), int)
  both = "query_segment_ids", "key_segment_ids"
  assert_refused(
    lambda **change: lsh_attention(query, **given | change),
    {"rotations": np.ones((2, H + 1, 2), float32)},
    {"rotations": np.ones((H, 2), float32)},
    {"rotations": np.ones((0, H, 2), float32)},
    {"rotations": np.ones((2, H, 2), int)},
    {"chunk_size": 0},
    {"chunk_size": 2.0},
    {"chunk_size": True},
    ("query_segment_ids", {"key_segment_ids": ids}),
    ("key_segment_ids", {"query_segment_ids": ids}),
    dict.fromkeys(both, ids[:, 1:]),
    {"dropout_rate": 1.0},
    ("dropout_rng", {"dropout_rate": 0.5}),
    ("query", {"value": np.ones((B, T, 2 * N, V), float32)}),
    ("query", {"value": np.ones((B, T, 3, V), float32)}),
  )
  assert_refused(
    lsh,
    {"num_rounds": 0},
    {"num_buckets": 3},
    {"num_buckets": 0},
    {"chunk_size": 0},
  )
  sizes = {"num_rounds": 1, "num_buckets": 2, "head_dim": 0}
  drawn = functools.partial(lsh_rotations, jax.random.key(0))
  assert_refused(drawn, ("head_dim", sizes))
  variables = {"constants": {"rotations": rotations()}}
  apply = functools.partial(lsh().apply, variables, query, value=value)
  options = "bias", "relative_bias", "global_indices"
  assert_refused(
    lambda key=None, **change: apply(key=key, **change),
    {"key": value},
    *({option: query} for option in options),
  )
