"""LSH attention: the budgets of devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import lsh_attention, platform
from attention.testing import assert_close
from tests.attention.lsh_cases import (
  B,
  N,
  T,
  V,
  both_directions,
  draw,
  packed,
  rotations,
)


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
    **jax.tree.map(jnp.asarray, packed(ids, mask)),
    "chunk_size": 4,
    "is_causal": True,
    "dropout_rate": 0.25,
    "dropout_rng": jax.random.key(3),
  }
  # Three steps of four chunks, two of which are padding, and then one step.
  monkeypatch.setattr(platform, "LEAST_ROWS", 16)
  several = value_and_pull(rotations(), **call)(query, value, cotangent)
  with platform.tracing_for("gpu"):
    one = value_and_pull(rotations(), **call)(query, value, cotangent)
  for got, expected in zip(one, several, strict=True):
    assert_close(got, expected, 1e-6)


@both_directions
@pytest.mark.parametrize(("name", "target"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_an_accelerator_takes_a_round_in_one_step(name, target, is_causal):
  length, num_rounds = 16384, 2
  shape = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)
  r = jnp.zeros((num_rounds, 64, 64))

  def trips(name):
    run = value_and_pull(r, chunk_size=64, is_causal=is_causal)
    with platform.tracing_for(name):
      traced = run.trace(shape, shape, shape)
    found = re.findall(r"\blength=(\d+)", str(traced.jaxpr))
    return traced, sorted(int(n) for n in found)

  traced, found = trips(name)
  # The hash; the chunks of a round, forward, made again and backward; the rounds.
  assert found == [1, 1, 1, 1, num_rounds, num_rounds]
  traced.lower(lowering_platforms=(target,))
  assert max(trips("cpu")[1]) >= length // 512
