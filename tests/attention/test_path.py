"""PaTH attention: all gradients, extremes, long prompts, errors."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import Dims, definitions, gates_from_keys, path, path_attention
from tests.attention import calls
from tests.refusals import assert_refused


def draw(length, seed=0):
  """All arrays of a call by name."""
  rng = np.random.default_rng(seed)
  shape = 2, length, 2
  w = rng.normal(size=(*shape, 8))
  found = {
    "query": rng.normal(size=(2, length, 4, 8)),
    "key": rng.normal(size=(*shape, 8)),
    "value": rng.normal(size=(*shape, 5)),
    "householder": w / np.linalg.norm(w, axis=-1, keepdims=True),
    "beta": 2.0 * rng.uniform(size=shape),
    "log_forget": -rng.exponential(0.1, size=(2, length, 4)),
  }
  return {name: np.asarray(x, np.float32) for name, x in found.items()}


def naive(given, mask, query_segment_ids, key_segment_ids):
  """(out, lse) by rotated keys, to be differentiated in float64."""
  keep = mask[:, 0, 0, :, None]
  key, value, w = (
    jnp.repeat(given[name], 2, axis=2)
    for name in ("key", "value", "householder")
  )
  beta = jnp.where(keep, jnp.repeat(given["beta"], 2, axis=2), 0.0)
  forget = jnp.where(keep, given["log_forget"], 0.0)
  length = key.shape[1]

  def step(carry, now):
    keys, sums = carry
    t, q, k, w, beta, forget = now
    along = jnp.einsum("bsnh,bnh->bsn", keys, w) * beta[:, None]
    keys = (keys - along[..., None] * w[:, None]).at[:, t].set(k)
    sums = (sums + forget[:, None]).at[:, t].set(0.0)
    scores = jnp.einsum("bsnh,bnh->bns", keys, q) * 8**-0.5
    return (keys, sums), scores + jnp.swapaxes(sums, 1, 2)

  along = (given["query"], key, w, beta, forget)
  along = [jnp.moveaxis(x, 1, 0) for x in along]
  carry = jnp.zeros_like(key), jnp.zeros_like(forget)
  _, scores = jax.lax.scan(step, carry, (jnp.arange(length), *along))
  scores = jnp.moveaxis(scores, 0, 2)
  same = query_segment_ids[:, :, None] == key_segment_ids[:, None]
  shown = mask & np.tri(length, dtype=bool)[None, None] & same[:, None]
  weights = jnp.where(shown, jax.nn.softmax(scores, where=shown), 0.0)
  lse = jax.nn.logsumexp(scores, axis=-1, where=shown)
  out = jnp.einsum("bnts,bsnv->btnv", weights, value)
  return out, jnp.swapaxes(lse, 1, 2)


def attend(given, call):
  return calls.counted(*path_attention(**given, **call, return_lse=True))


def test_values_and_all_gradients():
  """Of out and lse, for every array, across blocks.

  Hidden positions may hold anything.
  """
  given, call = draw(300), calls.masked_segments(300)

  @jax.jit
  def exact(given):
    return calls.counted(*naive(given, **call))

  def define(given):
    with jax.enable_x64(True):
      return jax.device_get(exact(given))

  spoiled = {name: x.copy() for name, x in given.items()}
  for name in spoiled.keys() - {"query"}:
    spoiled[name][~np.asarray(call["mask"])[:, 0, 0]] = np.nan
  run = partial(attend, call=call)
  calls.assert_defined(run, define, given, spoiled=spoiled)


def test_extremes():
  """Without turns it is dense attention; reflections all along, everything
  forgotten at once, and large scores.
  """
  given, call = draw(300), calls.masked_segments(300)
  given["beta"][:] = 0.0
  found, *_ = attend(given, call)
  plain = {x: given[x] for x in ("query", "key", "value", "log_forget")}
  expected = definitions.dense_attention(**plain, **call, is_causal=True)
  np.testing.assert_allclose(found, expected, atol=2e-6)
  given["beta"][:] = 2.0
  given["householder"][:, 20:40] = given["householder"][:, 20:21]
  given["log_forget"][:, ::7], given["log_forget"][:, 3::7] = -1e4, -90.0
  given["query"] *= 30.0
  (found, *_), gradients = calls.pulled(partial(attend, call=call), given)
  expected = definitions.path_attention(**given, **call)
  np.testing.assert_allclose(found, expected, atol=1e-4)
  for x in jax.tree.leaves(gradients):
    assert np.isfinite(x).all()


@pytest.mark.parametrize("forget", [False, True])
def test_prompts_longer_than_a_block(forget):
  length, dims = 160, Dims(4, 2, 8, 160, 16)
  mechanism = gates_from_keys(path(rank=3, forget=forget))
  variables = jax.jit(lambda key: mechanism.init(key, dims))(jax.random.key(0))
  query, key, value = calls.draw(length)
  apply = jax.jit(lambda *qkv: mechanism.apply(variables, *qkv, is_causal=True))
  expected = np.asarray(apply(query, key, value))
  cache = mechanism.init_cache(variables, 2, length, dims, jnp.float32)
  lengths = np.array([150, 7])
  cache = jax.jit(mechanism.prefill)(
    variables, cache, query, key, value, lengths
  )
  at = np.arange(2)[:, None], lengths[:, None]
  qkv = (np.asarray(x)[at] for x in (query, key, value))
  out, _ = jax.jit(mechanism.decode)(variables, cache, *qkv)
  np.testing.assert_allclose(out, expected[at], atol=3e-6)


def test_what_does_not_fit_is_told(unchecked):
  assert_refused(
    lambda **change: path_attention(**{**draw(9), **change}),
    {"is_causal": False, "log_forget": None},
    {"beta": np.ones((2, 9, 4), np.float32)},
    {"householder": np.ones((2, 9, 2, 4), np.float32)},
  )
