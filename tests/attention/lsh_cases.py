"""What the tests of LSH attention share: draws, and compiled calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.lsh import lsh_attention, lsh_rotations

B, T, N, K, H, V = 2, 37, 4, 2, 8, 6
CHUNK = 4


def draw(seed=0, length=T):
  rng = np.random.default_rng(seed)
  query = rng.standard_normal((B, length, N, H), np.float32)
  # Neighbours in time are near in angle, so that chunks look back.
  query[:, 1:] += query[:, :-1]
  value = rng.standard_normal((B, length, K, V), np.float32)
  mask = rng.random((B, 1, 1, length)) < 0.8
  return 2 * query, value, mask


def rotations(num_rounds=3, num_buckets=4, seed=0):
  return lsh_rotations(
    jax.random.key(seed),
    num_rounds=num_rounds,
    head_dim=H,
    num_buckets=num_buckets,
  )


STATIC = ("chunk_size", "is_causal", "dropout_rate")


@functools.partial(jax.jit, static_argnames=STATIC)
def attend_with_lse(query, value, rotations, **call):
  call = {"chunk_size": CHUNK, "return_lse": True, **call}
  return lsh_attention(query, value, rotations=rotations, **call)


def attend(*arrays, **call):
  return attend_with_lse(*arrays, **call)[0]


@functools.partial(jax.jit, static_argnames=STATIC)
def gradients(query, value, rotations, cotangent, lse_cotangent=None, **call):
  """Of Σ out · cotangent, and of Σ lse · lse_cotangent if there is one."""

  def run(query, value):
    return attend_with_lse(query, value, rotations, **call)

  (_, lse), pull = jax.vjp(run, query, value)
  zeros = jnp.zeros_like(lse)
  return pull((cotangent, zeros if lse_cotangent is None else lse_cotangent))


both_directions = pytest.mark.parametrize("is_causal", [False, True])


def packed(ids, mask=None):
  """A call with segments, and with a mask so that all share a program."""
  mask = np.ones((B, 1, 1, T), bool) if mask is None else mask
  return {"mask": mask, "query_segment_ids": ids, "key_segment_ids": ids}
