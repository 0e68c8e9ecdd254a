"""LSH attention: against the definition, its laws, decoding and faults."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions
from attention.lsh import lsh, lsh_attention, lsh_rotations
from attention.testing import assert_close
from tests.attention.forms import thorough
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


def define(query, value, **call):
  """The definition's out, and the log-sum-exp of the logits that it weighs."""
  out = definitions.lsh_attention(query, value, **call)
  identity = np.repeat(np.eye(T)[None, :, None], B, 0)
  weights = definitions.lsh_attention(query, identity, **call)
  norm = np.linalg.norm(query, axis=-1, keepdims=True)
  logits = np.einsum("btnh,bsnh->btns", query, query / norm) / np.sqrt(H)
  lse = np.logaddexp.reduce(np.where(weights > 0, logits, -np.inf), axis=-1)
  return out, lse


@pytest.mark.parametrize(
  ("is_packed", "is_causal"),
  [(False, False), (True, True), *thorough((False, True), (True, False))],
)
def test_values_and_gradients_are_those_of_the_definition(is_packed, is_causal):
  """Of out and of lse, which is −∞ where a token is masked."""
  query, value, mask = draw()
  rng = np.random.default_rng(1)
  r, call = rotations(), {"mask": mask, "is_causal": is_causal}
  if is_packed:
    # In any order, and the largest ids there are.
    ids = rng.choice(np.int32([-(2**31), 7, 2**31 - 1]), (B, T))
    call |= packed(ids, mask)
  arrays = [np.asarray(x, np.float64) for x in (query, value)]
  naive = functools.partial(
    define, rotations=np.asarray(r, np.float64), chunk_size=CHUNK, **call
  )
  out, lse = attend_with_lse(query, value, r, **call)
  expected_out, expected_lse = naive(*arrays)
  assert_close(out, expected_out, 1e-5)
  assert lse.dtype == np.float32
  np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)
  is_seen = np.broadcast_to(mask[:, 0, 0, :, None], lse.shape)
  np.testing.assert_array_equal(lse == -np.inf, ~is_seen)
  for cotangents in (
    (rng.standard_normal((B, T, N, V), np.float32), np.zeros_like(lse)),
    (np.zeros_like(out), rng.standard_normal((B, T, N), np.float32)),
  ):

    def total(*arrays, cotangents=cotangents):
      out, lse = naive(*arrays)
      lse = np.where(is_seen, lse, 0.0)
      return (out * cotangents[0]).sum() + (lse * cotangents[1]).sum()

    got = gradients(query, value, r, *cotangents, **call)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in got))
    for i, grad in enumerate(got):
      direction = rng.standard_normal(grad.shape)
      ahead, behind = (
        total(*arrays[:i], arrays[i] + h * direction, *arrays[i + 1 :])
        for h in (1e-6, -1e-6)
      )
      expected = (ahead - behind) / 2e-6
      assert abs((grad * direction).sum() - expected) <= 1e-5 * norm


def test_lse_of_tokens_whose_ids_differ_and_without_jit():
  query, value, _ = map(jnp.asarray, draw())
  r, ids = jnp.asarray(rotations()), np.zeros((B, T), np.int32)
  call = packed(ids)
  call["query_segment_ids"] = np.where(np.arange(T) < 4, 1, ids)
  out, lse = attend_with_lse(query, value, r, **call)
  assert not out[:, :4].any()
  assert (lse[:, :4] == -np.inf).all()
  assert np.isfinite(lse[:, 4:]).all()
  call = {**jax.tree.map(jnp.asarray, call), "chunk_size": CHUNK}
  eager = lsh_attention(query, value, rotations=r, **call, return_lse=True)
  for got, expected in zip(eager, (out, lse), strict=True):
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
  ("chunk_size", "num_buckets", "is_causal"),
  [
    *((1, 2, True), (3, 8, True), (16, 2, False)),
    *thorough((1, 2, False), (100, 1, True)),
  ],
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
@pytest.mark.parametrize("content", [1e4, np.inf, np.nan])
def test_masked_tokens_are_nowhere(content, is_causal):
  query, value, mask = draw()
  call = {"mask": mask, "is_causal": is_causal}
  r = rotations()
  before = attend(query, value, r, **call)
  gone = ~mask[:, 0, 0]
  assert gone.any()
  assert not np.asarray(before)[gone].any()
  cotangent = np.ones_like(before)
  slopes = jax.device_get(gradients(query, value, r, cotangent, **call))
  query[gone], value[gone] = content, content
  np.testing.assert_array_equal(attend(query, value, r, **call), before)
  for grad, slope in zip(
    gradients(query, value, r, cotangent, **call), slopes, strict=True
  ):
    np.testing.assert_array_equal(grad, slope)
    assert not np.asarray(grad)[gone].any()


@both_directions
def test_zeros_huge_vectors_and_nan(is_causal):
  query, value, mask = draw()
  r, call = rotations(), {"mask": mask, "is_causal": is_causal}
  cotangent = np.ones((B, T, N, V), np.float32)
  zero, huge = query.copy(), 1e4 * query
  zero[:, ::3] = 0.0
  for q in (zero, huge, np.zeros_like(query)):
    assert np.isfinite(attend(q, value, r, **call)).all()
    for grad in gradients(q, value, r, cotangent, **call):
      assert np.isfinite(grad).all()
  call["mask"] = mask.copy()
  call["mask"][1, ..., :5], call["mask"][1, ..., 5] = False, True
  query[1, 5] = np.nan
  # In the causal form it sees itself alone.
  out = np.asarray(attend(query, value, r, **call))
  assert np.isnan(out[1, 5]).all()
  assert np.isfinite(out[0]).all()


def test_a_traced_scale_has_a_gradient():
  query, value, _ = draw()
  r = rotations()

  @jax.jit
  def loss(scale, query):
    return jnp.sum(attend(query, value, r, scale=scale) ** 2)

  got, by_query = jax.grad(loss, argnums=(0, 1))(jnp.float32(0.4), query)
  # Only the product of scale and length matters.
  np.testing.assert_allclose(got * 0.4, (by_query * query).sum(), rtol=1e-3)


def test_the_plug_draws_rotations_for_its_length():
  dims = Dims(N, K, H, 4096)
  drawn = lsh().init(jax.random.key(0), dims)["constants"]["rotations"]
  assert drawn.shape == (4, H, 64)
  short = lsh(num_rounds=2).init(
    jax.random.key(0), dims._replace(max_length=70)
  )
  assert short["constants"]["rotations"].shape == (2, H, 2)
  # More rounds at evaluation are another array of rotations.
  query, value, _ = draw()
  variables = {"constants": {"rotations": rotations(8)}}
  out = jax.eval_shape(lsh().apply, variables, query, None, value)
  assert out.shape == (B, T, N, V)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
  ("name", "change"),
  [
    ("rotations", {"rotations": np.ones((2, H + 1, 2), np.float32)}),
    ("rotations", {"rotations": np.ones((H, 2), np.float32)}),
    ("rotations", {"rotations": np.ones((0, H, 2), np.float32)}),
    ("rotations", {"rotations": np.ones((2, H, 2), int)}),
    ("chunk_size", {"chunk_size": 0}),
    ("chunk_size", {"chunk_size": 2.0}),
    ("chunk_size", {"chunk_size": True}),
    ("query_segment_ids", {"key_segment_ids": np.ones((B, T), int)}),
    ("key_segment_ids", {"query_segment_ids": np.ones((B, T), int)}),
    ("query_segment_ids", packed(np.ones((B, T - 1), int))),
    ("dropout_rate", {"dropout_rate": 1.0}),
    ("dropout_rng", {"dropout_rate": 0.5}),
    ("mask", {"mask": np.ones((B, 1, T, T), bool)}),
    ("mask", {"mask": np.ones((B, N, 1, T), bool)}),
    ("mask", {"mask": np.ones((B, 1, 1, T), np.float32)}),
    ("scale", {"scale": float("nan")}),
    ("value", {"value": np.ones((B, T - 1, K, V), np.float32)}),
    ("query", {"value": np.ones((B, T, 2 * N, V), np.float32)}),
    ("value", {"value": np.ones((B, T, K, V), int)}),
    ("query", {"value": np.ones((B, T, 3, V), np.float32)}),
  ],
)
def test_errors_name_the_argument(name, change):
  query, value, _ = draw()
  call = {"rotations": rotations(), "chunk_size": CHUNK, "value": value}
  call |= change
  with pytest.raises(ValueError, match=rf"^{name}: .*(expected|multiple)"):
    lsh_attention(query, call.pop("value"), **call)


@pytest.mark.usefixtures("unchecked")
def test_the_factory_checks_and_refuses():
  for name, options in (
    ("num_rounds", {"num_rounds": 0}),
    ("num_buckets", {"num_buckets": 3}),
    ("num_buckets", {"num_buckets": 0}),
    ("chunk_size", {"chunk_size": 0}),
  ):
    with pytest.raises(ValueError, match=rf"^{name}: expected"):
      lsh(**options)
  with pytest.raises(ValueError, match=r"^head_dim: expected"):
    lsh_rotations(jax.random.key(0), num_rounds=1, head_dim=0, num_buckets=2)
  attention = lsh()
  query, value, _ = draw()
  variables = attention.init(jax.random.key(0), Dims(N, K, H, T))
  with pytest.raises(ValueError, match=r"^key: .+ expected None; .+"):
    attention.apply(variables, query, query, value)
  for option in ("bias", "relative_bias", "global_indices"):
    with pytest.raises(ValueError, match=rf"^{option}: .+; .+"):
      attention.apply(variables, query, None, value, **{option: query})
