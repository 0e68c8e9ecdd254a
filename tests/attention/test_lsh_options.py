"""LSH attention: packed examples, and dropout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.testing import assert_close
from tests.attention.lsh_cases import (
  CHUNK,
  B,
  H,
  K,
  N,
  T,
  V,
  attend,
  attend_with_lse,
  both_directions,
  draw,
  gradients,
  packed,
  rotations,
)


def in_segments(ids, is_causal):
  """Outputs and gradients of packed examples, and of each one alone."""
  query, value, _ = draw()
  cotangent = np.random.default_rng(1).standard_normal((B, T, N, V), np.float32)

  def run(**call):
    call["is_causal"] = is_causal
    out = attend(query, value, rotations(), **call)
    return out, *gradients(query, value, rotations(), cotangent, **call)

  # Masked tokens are nowhere and give zeros: the sum of all has each once.
  alone = [run(mask=(ids == i)[:, None, None]) for i in np.unique(ids)]
  return run(**packed(ids)), [sum(parts) for parts in zip(*alone, strict=True)]


def test_causal_a_packed_example_gives_what_it_gives_alone():
  ids = np.random.default_rng(0).integers(0, 3, (B, T))
  for got, expected in zip(*in_segments(ids, is_causal=True), strict=True):
    assert_close(got, expected, 1e-6)


def test_packed_examples_give_what_they_give_alone_at_multiples_of_the_chunk():
  ids = np.repeat([[3, 5, 4]], B, 0).repeat([3 * CHUNK, 9, 4 * CHUNK], axis=1)
  for got, expected in zip(*in_segments(ids, is_causal=False), strict=True):
    assert_close(got, expected, 1e-6)


@both_directions
def test_what_other_segments_hold_changes_no_bit(is_causal):
  ids = np.random.default_rng(0).integers(0, 3, (B, T))
  call = {**packed(ids), "is_causal": is_causal}
  query, value, _ = draw()
  before = np.asarray(attend(query, value, rotations(), **call))
  others = ids != 1
  query[others], value[others] = -3 * query[others], 1e4
  after = np.asarray(attend(query, value, rotations(), **call))
  np.testing.assert_array_equal(after[~others], before[~others])
  assert (after[others] != before[others]).any()


@both_directions
def test_alone_in_its_segment_a_token_sees_itself(is_causal):
  query, value, _ = draw()
  ids = np.repeat(np.arange(T)[None], B, 0)
  query[0, 0] = 0.0
  call = {**packed(ids), "is_causal": is_causal}
  out, lse = attend_with_lse(query, value, rotations(), **call)
  np.testing.assert_array_equal(out, np.repeat(value, N // K, 2))
  norm = np.linalg.norm(query, axis=-1)
  np.testing.assert_allclose(lse, norm / np.sqrt(H), rtol=1e-5)
  zeros, ones = np.zeros_like(out), np.ones_like(lse)
  grad, _ = gradients(query, value, rotations(), zeros, ones, **call)
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

  rng = np.random.default_rng(1)
  cotangent = rng.standard_normal((1, length, N, V), np.float32)
  for got, expected in zip(
    gradients(query, value, r, cotangent, **call, **dropout),
    jax.jit(lambda *x: jax.vjp(by_hand, *x)[1](cotangent))(query, value),
    strict=True,
  ):
    assert_close(got, expected, 1e-5)


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
