"""LSH attention: against the definition, its laws, packed examples, devices, faults."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions
from attention.lsh import lsh, lsh_attention, lsh_rotations
from attention.platform import backend
from attention.testing import assert_close
from tests.attention.calls import assert_refused, normal
from tests.attention.calls import pulled as pulled_once

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


STATIC = ("chunk_size", "is_causal", "dropout_rate")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend_with_lse(query, value, rotations, **call):
  call = {"chunk_size": CHUNK, "return_lse": True, **call}
  return lsh_attention(query, value, rotations=rotations, **call)


def attend(*arrays, **call):
  return attend_with_lse(*arrays, **call)[0]


@functools.partial(jax.jit, static_argnames=STATIC)
def pulled(query, value, rotations, cotangents, **call):
  """(out, lse), and gradients of query and value for the cotangents of both."""

  def run(query, value):
    return attend_with_lse(query, value, rotations, **call)

  results, pull = jax.vjp(run, query, value)
  return results, pull(cotangents)


ONES = np.ones((B, T, N, V), np.float32), np.zeros((B, T, N), np.float32)


def packed(ids=None, mask=None):
  """Segments and a mask, always both, so that calls share a program."""
  mask = np.ones((B, 1, 1, T), bool) if mask is None else mask
  ids = np.zeros((B, T), np.int32) if ids is None else np.asarray(ids, np.int32)
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


@pytest.mark.parametrize("is_causal_and_packed", [False, True])
def test_values_and_gradients_are_those_of_the_definition(is_causal_and_packed):
  """Of out and of lse, which is −∞ where a token is masked."""
  query, value, mask = draw()
  rng = np.random.default_rng(1)
  r, call = rotations(), {"mask": mask, "is_causal": is_causal_and_packed}
  if is_causal_and_packed:
    # In any order, and the largest ids there are.
    ids = rng.choice(np.int32([-(2**31), 7, 2**31 - 1]), (B, T))
    call |= packed(ids, mask)
  arrays = [np.asarray(x, np.float64) for x in (query, value)]
  naive = functools.partial(
    define, rotations=np.asarray(r, np.float64), chunk_size=CHUNK, **call
  )
  expected_out, expected_lse = naive(*arrays)
  is_seen = np.broadcast_to(mask[:, 0, 0, :, None], (B, T, N))
  zeros = [np.zeros_like(x) for x in ONES]
  random = [rng.standard_normal(x.shape, np.float32) for x in ONES]
  for cotangents in (random[0], zeros[1]), (zeros[0], random[1]):
    (out, lse), got = pulled(query, value, r, cotangents, **call)
    assert_close(out, expected_out, 1e-5)
    assert lse.dtype == np.float32
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(lse == -np.inf, ~is_seen)

    def total(*arrays, cotangents=cotangents):
      out, lse = naive(*arrays)
      lse = np.where(is_seen, lse, 0.0)
      return (out * cotangents[0]).sum() + (lse * cotangents[1]).sum()

    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in got))
    for i, grad in enumerate(got):
      direction = rng.standard_normal(grad.shape)
      ahead, behind = (
        total(*arrays[:i], arrays[i] + h * direction, *arrays[i + 1 :])
        for h in (1e-6, -1e-6)
      )
      expected = (ahead - behind) / 2e-6
      assert abs((grad * direction).sum() - expected) <= 1e-5 * norm


def test_lse_of_tokens_whose_ids_differ():
  query, value, _ = draw()
  call = packed()
  call["query_segment_ids"] = np.tile(np.int32(np.arange(T) < 4), (B, 1))
  (out, lse), _ = pulled(
    query, value, rotations(), ONES, is_causal=False, **call
  )
  assert not np.any(out[:, :4])
  assert np.all(lse[:, :4] == -np.inf)
  assert np.isfinite(lse[:, 4:]).all()


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
def test_masked_tokens_are_nowhere(is_causal):
  query, value, mask = draw()
  gone = ~mask[:, 0, 0]

  def run():
    call = {**packed(mask=mask), "is_causal": is_causal}
    results = pulled(query, value, rotations(), ONES, **call)
    (out, _), gradients = jax.device_get(results)
    return out, *gradients

  before = run()
  for x in before:
    assert not np.asarray(x)[gone].any()
  for content in (1e4, np.inf, np.nan):
    query[gone], value[gone] = content, content
    chex.assert_trees_all_equal(run(), before)


@both_directions
def test_zeros_huge_vectors_and_nan(is_causal):
  query, value, mask = draw()
  zero, huge = query.copy(), 1e4 * query
  zero[:, ::3] = 0.0
  mask[1, ..., :5], mask[1, ..., 5] = False, True
  call = {**packed(mask=mask), "is_causal": is_causal}
  for q in (zero, huge, np.zeros_like(query)):
    (out, _), gradients = pulled(q, value, rotations(), ONES, **call)
    for x in (out, *gradients):
      assert np.isfinite(x).all()
  query[1, 5] = np.nan
  # In the causal form it sees itself alone.
  (out, _), _ = pulled(query, value, rotations(), ONES, **call)
  assert np.isnan(out[1, 5]).all()
  assert np.isfinite(out[0]).all()


def test_a_traced_scale_has_a_gradient():
  query, value, _ = draw()

  def run(scale, query):
    return attend(query, value, rotations(), scale=scale)

  _, (got, by_query) = pulled_once(run, jnp.float32(0.4), query)
  # Only the product of scale and length matters.
  np.testing.assert_allclose(got * 0.4, (by_query * query).sum(), rtol=1e-3)


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
def test_a_packed_example_gives_what_it_gives_alone(is_causal):
  """In both directions at multiples of the chunk, if causal in any order."""
  query, value, _ = draw()
  ids = np.repeat([[3, 5, 4]], B, 0).repeat([3 * CHUNK, 9, 4 * CHUNK], axis=1)
  if is_causal:
    ids = np.random.default_rng(0).integers(0, 3, (B, T))
  (random,) = map(np.asarray, normal(ONES[0].shape, seed=1))

  def run(**call):
    cotangents, call["is_causal"] = (random, ONES[1]), is_causal
    (out, _), grads = pulled(query, value, rotations(), cotangents, **call)
    return out, *grads

  # Masked tokens are nowhere and give zeros: the sum of all has each once.
  alone = [
    run(**packed(mask=(ids == i)[:, None, None])) for i in np.unique(ids)
  ]
  expected = [sum(parts) for parts in zip(*alone, strict=True)]
  for x, y in zip(run(**packed(ids)), expected, strict=True):
    assert_close(x, y, 1e-6)


@both_directions
def test_what_other_segments_hold_changes_no_bit(is_causal):
  ids = np.random.default_rng(0).integers(0, 3, (B, T))
  call = {**packed(ids), "is_causal": is_causal}
  query, value, _ = draw()

  def run():
    # A program that still runs reads the arrays themselves: it has to end.
    return np.asarray(pulled(query, value, rotations(), ONES, **call)[0][0])

  before, others = run(), ids != 1
  query[others], value[others] = -3 * query[others], 1e4
  after = run()
  np.testing.assert_array_equal(after[~others], before[~others])
  assert (after[others] != before[others]).any()


@both_directions
def test_alone_in_its_segment_a_token_sees_itself(is_causal):
  query, value, _ = draw()
  query[0, 0] = 0.0
  call = {**packed(np.repeat(np.arange(T)[None], B, 0)), "is_causal": is_causal}
  cotangents = 0 * ONES[0], 1 + ONES[1]
  (out, lse), (grad, _) = pulled(query, value, rotations(), cotangents, **call)
  np.testing.assert_array_equal(out, np.repeat(value, N // K, 2))
  norm = np.linalg.norm(query, axis=-1)
  np.testing.assert_allclose(lse, norm / np.sqrt(H), rtol=1e-5)
  length = np.where(norm, norm, 1.0)[..., None]
  assert_close(grad, query / length / np.sqrt(H), 1e-6)


@pytest.mark.parametrize(
  ("is_causal", "chunk_size"),
  # With chunks of one token, causal, each sees itself alone.
  [(False, 8), (True, 1)],
)
def test_dropout_drops_weights(is_causal, chunk_size):
  """Each weight is 0 or 1/(1 - rate) of itself, and gradients agree on which."""
  rate, length = 0.25, 150
  query, value, _ = (x[:1] for x in draw(length=length))
  identity = np.eye(length, dtype=np.float32)[None, :, None, :]
  call = {"is_causal": is_causal, "chunk_size": chunk_size}
  dropout = {"dropout_rate": rate, "dropout_rng": jax.random.key(3)}
  r = rotations()
  (exact, lse), (weights, lse_of_dropout) = (
    attend_with_lse(query, identity, r, **call, **more)
    for more in ({}, dropout)
  )
  np.testing.assert_allclose(lse_of_dropout, lse, rtol=1e-6)
  exact, weights = (np.moveaxis(x, 2, 1) for x in (exact, weights))
  seen, kept = exact != 0, weights != 0
  assert not (kept & ~seen).any()
  np.testing.assert_allclose(weights[kept], exact[kept] / (1 - rate), rtol=2e-5)
  deviation = np.sqrt(rate * (1 - rate) / seen.sum())
  assert abs(kept.sum() / seen.sum() - (1 - rate)) < 4 * deviation

  def by_hand(query, value):
    key = query / jnp.linalg.norm(query, axis=-1, keepdims=True)
    logits = jnp.einsum("BTNH,BSNH->BNTS", query, key) / np.sqrt(H)
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
    value = jnp.repeat(value, N // K, axis=2)
    weights = weights * kept / (1 - rate)
    return jnp.einsum("BNTS,BSNV->BTNV", weights, value)

  if is_causal:
    return
  run = functools.partial(attend, rotations=r, **call, **dropout)
  got, expected = (pulled_once(f, query, value) for f in (run, by_hand))
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
    assert_close(x, y, 1e-5)


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


def value_and_pull(rotations, **call):
  """A new function at every call, because `jit` keeps traces by function."""

  def run(query, value, cotangent):
    def attend(query, value):
      return lsh_attention(query, value, rotations=rotations, **call)

    out, pull = jax.vjp(attend, query, value)
    return out, *pull(cotangent)

  return jax.jit(run)


def test_the_budget_of_a_device_changes_no_result(monkeypatch):
  query, value, mask = draw()
  cotangent = np.random.default_rng(1).standard_normal((B, T, N, V), np.float32)
  ids = np.sort(np.random.default_rng(2).integers(0, 3, (B, T)))
  call = {
    **packed(ids, mask),
    "chunk_size": 4,
    "is_causal": True,
    "dropout_rate": 0.25,
    "dropout_rng": jax.random.key(3),
  }
  # Three steps of four chunks, two of which are padding, and then one step.
  monkeypatch.setattr(backend, "LEAST_ROWS", 16)
  several = value_and_pull(rotations(), **call)(query, value, cotangent)
  with backend.tracing_for("gpu"):
    one = value_and_pull(rotations(), **call)(query, value, cotangent)
  for got, expected in zip(one, several, strict=True):
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize(
  ("target", "is_causal"), [("cuda", False), ("cuda", True), ("tpu", True)]
)
def test_an_accelerator_takes_a_round_in_one_step(target, is_causal):
  length, num_rounds = 16384, 2
  shape = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)
  r = jnp.zeros((num_rounds, 64, 64))

  def trips(name):
    run = value_and_pull(r, chunk_size=64, is_causal=is_causal)
    with backend.tracing_for(name):
      traced = run.trace(shape, shape, shape)
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
  short = dict.fromkeys(("query_segment_ids", "key_segment_ids"), ids[:, 1:])
  assert_refused(
    lambda **change: lsh_attention(query, **given | change),
    [
      (f"{name}: .*(expected|multiple)", change)
      for name, change in (
        ("rotations", {"rotations": np.ones((2, H + 1, 2), float32)}),
        ("rotations", {"rotations": np.ones((H, 2), float32)}),
        ("rotations", {"rotations": np.ones((0, H, 2), float32)}),
        ("rotations", {"rotations": np.ones((2, H, 2), int)}),
        ("chunk_size", {"chunk_size": 0}),
        ("chunk_size", {"chunk_size": 2.0}),
        ("chunk_size", {"chunk_size": True}),
        ("query_segment_ids", {"key_segment_ids": ids}),
        ("key_segment_ids", {"query_segment_ids": ids}),
        ("query_segment_ids", short),
        ("dropout_rate", {"dropout_rate": 1.0}),
        ("dropout_rng", {"dropout_rate": 0.5}),
        ("mask", {"mask": np.ones((B, 1, T, T), bool)}),
        ("mask", {"mask": np.ones((B, N, 1, T), bool)}),
        ("mask", {"mask": np.ones((B, 1, 1, T), float32)}),
        ("scale", {"scale": float("nan")}),
        ("value", {"value": np.ones((B, T - 1, K, V), float32)}),
        ("query", {"value": np.ones((B, T, 2 * N, V), float32)}),
        ("value", {"value": np.ones((B, T, K, V), int)}),
        ("query", {"value": np.ones((B, T, 3, V), float32)}),
      )
    ],
  )
  assert_refused(
    lsh,
    (
      ("num_rounds: expected", {"num_rounds": 0}),
      ("num_buckets: expected", {"num_buckets": 3}),
      ("num_buckets: expected", {"num_buckets": 0}),
      ("chunk_size: expected", {"chunk_size": 0}),
    ),
  )
  with pytest.raises(ValueError, match=r"^head_dim: expected"):
    lsh_rotations(jax.random.key(0), num_rounds=1, head_dim=0, num_buckets=2)
  apply = functools.partial(
    lsh().apply, {"constants": {"rotations": rotations()}}, query
  )
  with pytest.raises(ValueError, match=r"^key: .+ expected None; .+"):
    apply(query, value)
  for option in ("bias", "relative_bias", "global_indices"):
    with pytest.raises(ValueError, match=rf"^{option}: .+; .+"):
      apply(None, value, **{option: query})
