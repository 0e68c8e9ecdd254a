"""Decoding one position at a time equals the causal call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.attention.cases import Case, assert_close
from tests.attention.mechanisms import MECHANISMS, ONE_EACH

DECODERS = [m for m in MECHANISMS if "decode" in m.build().supports]
LENGTH = 12
decoders = pytest.mark.parametrize("mechanism", DECODERS, ids=str)


def step_by_step(attention, variables, cache, qkv, **call):
  """Decodes position after position under `lax.scan`; `[B, T, N, V]`."""

  def step(cache, at):
    out, cache = attention.decode(
      variables, cache, *(x[:, None] for x in at), **call
    )
    return cache, out[:, 0]

  in_time = [jnp.moveaxis(x, 1, 0) for x in qkv]
  cache, outs = jax.lax.scan(step, cache, in_time)
  return cache, jnp.moveaxis(outs, 0, 1)


def setup(mechanism, case, dtype=jnp.float32):
  attention = mechanism.build()
  variables = attention.init(jax.random.key(0), case.dims)
  cache = attention.init_cache(
    variables, case.batch, case.length, case.dims, dtype
  )
  qkv = [jnp.asarray(x, dtype) for x in mechanism.draw(case)[0]]
  return attention, variables, cache, qkv


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@decoders
def test_decoding_equals_the_causal_call(mechanism, num_kv_heads):
  case = Case(length=LENGTH, num_kv_heads=num_kv_heads)
  attention, variables, cache, qkv = setup(mechanism, case)
  expected = attention.apply(variables, *qkv, is_causal=True)

  step = jax.jit(lambda *args: attention.decode(*args))
  one_cache, outs = cache, []
  for t in range(LENGTH):
    out, one_cache = step(variables, one_cache, *(x[:, t : t + 1] for x in qkv))
    outs.append(out)
  assert step._cache_size() == 1
  assert_close(jnp.concatenate(outs, axis=1), expected, 1e-5)

  scan_cache, scanned = jax.jit(
    lambda cache, qkv: step_by_step(attention, variables, cache, qkv)
  )(cache, qkv)
  assert_close(scanned, expected, 1e-5)
  assert jax.tree.structure(scan_cache) == jax.tree.structure(cache)


@pytest.mark.parametrize(
  "mechanism",
  [m for m in DECODERS if "relative" in m.build().supports],
  ids=str,
)
def test_decoding_with_relative_positions(mechanism):
  case = Case(("relative",), length=LENGTH)
  attention, variables, cache, qkv = setup(mechanism, case)
  tables = jax.tree.map(jnp.asarray, case.draw()[1])
  expected = attention.apply(variables, *qkv, is_causal=True, **tables)
  _, out = step_by_step(attention, variables, cache, qkv, **tables)
  assert_close(out, expected, 1e-5)


@pytest.mark.parametrize(
  "mechanism", [m for m in ONE_EACH if m in DECODERS], ids=str
)
def test_decoding_in_bfloat16(mechanism):
  case = Case(length=LENGTH)
  attention, variables, cache, qkv = setup(mechanism, case, jnp.bfloat16)
  _, out = step_by_step(attention, variables, cache, qkv)
  assert out.dtype == jnp.bfloat16
  expected = mechanism.reference(
    jax.tree.map(lambda x: np.asarray(x, np.float64), variables),
    *(np.asarray(x, np.float64) for x in qkv),
    is_causal=True,
  )
  assert_close(out, expected, 2e-2)


@decoders
def test_neighbours_in_the_batch_do_not_matter(mechanism):
  case = Case(length=LENGTH)
  attention, variables, cache, qkv = setup(mechanism, case)
  decode = jax.jit(
    lambda cache, qkv: step_by_step(attention, variables, cache, qkv)[1]
  )
  before = decode(cache, qkv)
  qkv = [x.at[1].set(1e4) for x in qkv]
  np.testing.assert_array_equal(decode(cache, qkv)[0], before[0])


@decoders
def test_caches_can_be_gathered_at_different_positions(mechanism):
  """Beam search reorders every leaf along its first axis."""
  case = Case(length=LENGTH)
  attention, variables, empty, qkv = setup(mechanism, case)
  expected = attention.apply(variables, *qkv, is_causal=True)

  @jax.jit
  def decode(cache, qkv):
    return step_by_step(attention, variables, cache, qkv)

  early, _ = decode(empty, [x[:, :4] for x in qkv])
  late, _ = decode(early, [x[:, 4:8] for x in qkv])
  assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(late))
  swapped = jax.tree.map(lambda a, b: jnp.stack([a[1], b[0]]), late, early)
  rest = [jnp.stack([x[1, 8:12], x[0, 4:8]]) for x in qkv]
  _, out = decode(swapped, rest)
  assert_close(out[0], expected[1, 8:12], 1e-5)
  assert_close(out[1], expected[0, 4:8], 1e-5)


@decoders
def test_the_size_of_the_cache(mechanism):
  attention = mechanism.build()
  dims = Case(length=512).dims
  variables = attention.init(jax.random.key(0), dims)

  def size(max_length):
    cache = attention.init_cache(variables, 2, max_length, dims, jnp.float32)
    # The positions are counted apart: 4 bytes an example in any case.
    leaves = [x for x in jax.tree.leaves(cache) if x.dtype != jnp.int32]
    return sum(leaf.nbytes for leaf in leaves)

  growth = {"length": 8, "nothing": 1}[mechanism.cache]
  assert size(512) == growth * size(64)


def test_what_cannot_decode_has_no_cache():
  for mechanism in MECHANISMS:
    attention = mechanism.build()
    decodes = "decode" in attention.supports
    assert (attention.init_cache is not None) == decodes
    assert (attention.decode is not None) == decodes
    assert "causal" in attention.supports or not decodes
