"""Linear attention in blocks of any size, and as a GPU or TPU would run it."""

from functools import partial
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  linear,
  linear_attention,
  orthogonal_features,
  performer,
  performer_attention,
  platform,
)
from attention.testing import assert_close
from tests.attention.forms import thorough

PROJECTION = orthogonal_features(jax.random.key(0), 16, 8)
ATTEND = {
  "linear": linear_attention,
  "performer": partial(performer_attention, projection=PROJECTION),
}
both = pytest.mark.parametrize("name", ATTEND)
causal_or_not = pytest.mark.parametrize(
  "is_causal", [False, True], ids=["", "causal"]
)


def _inputs(length, source_length, size=1.0):
  rng = np.random.default_rng(0)
  shapes = (length, 4, 8), (source_length, 2, 8), (source_length, 2, 5)
  return [
    jnp.asarray(size * rng.standard_normal((2, *shape), np.float32))
    for shape in shapes
  ]


def _with_gradients(attend, qkv, **call):
  @jax.jit
  def run(*qkv):
    out, pullback = jax.vjp(lambda *qkv: attend(*qkv, **call), *qkv)
    return out, pullback(jnp.cos(jnp.arange(out.size)).reshape(out.shape))

  return run(*qkv)


def _assert_equal(got, expected, tolerance=1e-5):
  (out, gradients), (expected_out, expected_gradients) = got, expected
  assert_close(out, expected_out, tolerance)
  for x, y in zip(gradients, expected_gradients, strict=True):
    assert_close(x, y, 10 * tolerance)


# A budget of 40,000 bytes is a few blocks a step, and so several steps.
@pytest.mark.parametrize(
  ("name", "is_causal", "length", "source_length", "budget"),
  [
    ("linear", False, 300, 517, 40_000),
    ("performer", True, 300, 517, 40_000),
    *thorough(
      ("linear", True, 300, 300, 40_000),
      ("linear", True, 300, 517, None),
      ("performer", False, 300, 300, None),
      ("performer", True, 517, 300, None),
    ),
  ],
)
def test_many_blocks_at_once_give_the_same_numbers(
  name, is_causal, length, source_length, budget, monkeypatch
):
  qkv = _inputs(length, source_length)
  mask = jnp.asarray(np.random.default_rng(1).random(source_length) < 0.8)
  call = {"mask": mask[None, None, None], "is_causal": is_causal}
  expected = _with_gradients(ATTEND[name], qkv, **call)
  if budget is not None:
    fewer = platform.ACCELERATOR._replace(tile_bytes=budget)
    monkeypatch.setattr(platform, "ACCELERATOR", fewer)
    call["block_size"] = 16 if is_causal else None
  with platform.tracing_for("gpu"):
    got = _with_gradients(ATTEND[name], qkv, **call)
  _assert_equal(got, expected)


def test_far_apart_rows_of_many_chunks_are_not_lost():
  """Scores down to e^-1000, in all chunks at once and in one after another."""
  qkv = _inputs(200, 200, size=20.0)
  call = {"is_causal": True, "block_size": 32}
  expected = _with_gradients(ATTEND["performer"], qkv, **call)
  with platform.tracing_for("gpu"):
    got = _with_gradients(ATTEND["performer"], qkv, **call)
  assert np.isfinite(expected[0]).all()
  # Logarithms of scores are exact to their own rounding, 1e-7 of 1,000.
  _assert_equal(got, expected, 1e-4)


@pytest.mark.parametrize(
  "target", ["gpu", pytest.param("tpu", marks=pytest.mark.thorough)]
)
@both
def test_future_does_not_reach_the_past_of_many_chunks(name, target):
  qkv = _inputs(300, 300)
  later = [x.at[:, 200:].set(7.0) for x in qkv]
  with platform.tracing_for(target):
    out, changed = (
      jax.jit(partial(ATTEND[name], is_causal=True))(*x) for x in (qkv, later)
    )
  np.testing.assert_array_equal(out[:, :200], changed[:, :200])


@pytest.mark.parametrize(
  ("name", "is_causal"),
  [
    ("linear", False),
    ("performer", True),
    *thorough(("linear", True), ("performer", False)),
  ],
)
def test_any_block_size_gives_the_same_numbers(name, is_causal):
  qkv = _inputs(65, 65)
  attend = partial(ATTEND[name], is_causal=is_causal)
  expected = _with_gradients(attend, qkv)
  for block_size in (1, 7) if is_causal else (7, 1000):
    _assert_equal(_with_gradients(attend, qkv, block_size=block_size), expected)


@pytest.mark.parametrize("block_size", [0, -1, 2.0, True, "256"])
@both
def test_a_bad_block_size_is_refused(name, block_size, unchecked):
  with pytest.raises(ValueError, match="block_size: expected"):
    ATTEND[name](*_inputs(4, 4), block_size=block_size)


def test_a_block_size_may_be_part_of_a_call():
  query, key, value = _inputs(20, 20)
  out = linear().apply({}, query, key, value, block_size=8)
  assert_close(out, linear_attention(query, key, value), 1e-6)
  variables = {"constants": {"projection": PROJECTION}}
  apply = partial(performer(16).apply, variables, query, key, value)
  assert_close(apply(block_size=8), apply(), 1e-6)


@pytest.mark.parametrize(
  ("target", "lowered"),
  [("gpu", "cuda"), *thorough(("tpu", "tpu"))],
)
@causal_or_not
@both
def test_it_lowers_for_accelerators_with_few_steps(
  name, is_causal, target, lowered
):
  x = jax.ShapeDtypeStruct((1, 16_384, 8, 8), jnp.bfloat16)

  def loss(*qkv):
    out = ATTEND[name](*qkv, is_causal=is_causal)
    return jnp.sum(out.astype(jnp.float32))

  with platform.tracing_for(target):
    traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(x, x, x)
    traced.lower(lowering_platforms=(lowered,))
  trips = [int(n) for n in re.findall(r"\blength=(\d+)", str(traced.jaxpr))]
  assert trips
  assert max(trips) <= 8
