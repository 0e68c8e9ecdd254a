"""Decoding one position at a time equals the causal call."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.testing.calls import (
  Case,
  assert_close,
  assert_same_bits,
  require,
)
from attention.testing.mechanism import Mechanism, law, shared

_LENGTH = 12
_CASE = Case(length=_LENGTH)


@shared
def _empty(mechanism, case, dtype):
  """An empty cache for the whole sequence."""
  variables = mechanism.variables(case.dims)
  sizes = case.batch, case.length, case.dims, dtype
  return mechanism.init_cache(variables, *sizes)


def _start(
  mechanism: Mechanism, case: Case = _CASE, dtype: Any = np.float32
) -> tuple[Any, Any, list]:
  """Variables, an empty cache, and query, key and value."""
  qkv, _ = mechanism.draw(case, cached=True)
  variables = mechanism.variables(case.dims)
  cache = _empty(mechanism, case, dtype)
  return variables, cache, [x.astype(dtype) for x in qkv]


def _causal(mechanism, variables, qkv, **call):
  """The causal call on the whole sequence, by the definition that it equals."""
  return mechanism.define(variables, qkv, is_causal=True, **call)


def _scanned(mechanism: Mechanism, **functions: Any) -> Any:
  """The jitted `(variables, cache, qkv, tables) -> (out, cache)`."""

  @jax.jit
  def run(variables, cache, qkv, tables):
    def step(cache, at):
      at = [x[:, None] for x in at]
      out, cache = mechanism.decode(variables, cache, at, **tables, **functions)
      return cache, out[:, 0]

    in_time = [jnp.moveaxis(x, 1, 0) for x in qkv]
    cache, outs = jax.lax.scan(step, cache, in_time)
    return jnp.moveaxis(outs, 0, 1), cache

  return run


_shared_scan = shared(_scanned)


@shared
def _stepped(mechanism):
  """Jitted decoding of one position, and a list that grows with each trace."""
  traces = []

  @jax.jit
  def step(variables, cache, qkv):
    traces.append(None)
    return mechanism.decode(variables, cache, qkv)

  return step, traces


def _decode(mechanism, variables, cache, qkv):
  """Decodes position after position, as `_scanned` without the scan."""
  step, _ = _stepped(mechanism)
  outs = []
  for t in range(qkv[0].shape[1]):
    out, cache = step(variables, cache, [x[:, t : t + 1] for x in qkv])
    outs.append(out)
  return np.concatenate(outs, axis=1), cache


@law("decode")
def decoding_equals_the_causal_call(mechanism: Mechanism) -> None:
  """Decoding from an empty cache must give what the causal call gives.

  Every leaf of the cache has a leading axis B, and a shape and dtype that stay.
  Frequent causes: the new key is written one place off, places that are not
  filled yet are not masked, query head n does not read key head n // (N/K), an
  example depends on others of its batch.
  """
  variables, cache, qkv = _start(mechanism, _CASE._replace(num_kv_heads=1))
  decode = _shared_scan(mechanism)
  out, after = decode(variables, cache, qkv, {})
  out = np.asarray(out)
  assert_close(out, _causal(mechanism, variables, qkv), 1e-5)
  require(
    jax.tree.structure(after) == jax.tree.structure(cache),
    "decode returns a cache of another structure than it got",
  )
  for x in qkv:
    x[1] = 1e4
  moved, _ = decode(variables, cache, qkv, {})
  assert_same_bits(
    moved[0], out[0], "example 0 changes when example 1 of the batch does"
  )


@law("decode")
def decoding_is_compiled_once(mechanism: Mechanism) -> None:
  """Steps are compiled once, as a generating program calls them.

  A cache must keep its structure, shapes and dtypes from step to step.
  """
  variables, cache, qkv = _start(mechanism)
  _, traces = _stepped(mechanism)
  before = len(traces)
  out, _ = _decode(mechanism, variables, cache, qkv)
  assert_close(out, _causal(mechanism, variables, qkv), 1e-5)
  require(
    len(traces) <= before + 1,
    f"{_LENGTH} steps were traced {len(traces) - before} times, expected once",
  )


@law("decode", "relative")
def decoding_with_relative_positions(mechanism: Mechanism) -> None:
  """`decode` must take relative_bias and relative_keys as the causal call does."""
  case = _CASE._replace(options=("relative",))
  variables, cache, qkv = _start(mechanism, case)
  _, tables = mechanism.draw(case)
  out, _ = _shared_scan(mechanism)(variables, cache, qkv, tables)
  assert_close(out, _causal(mechanism, variables, qkv, **tables), 1e-5)


@law("decode", "mods")
def decoding_with_functions_of_indices(mechanism: Mechanism) -> None:
  """`decode` must take score_mod and mask_mod as the causal call does.

  t is the position, and s that of the key in each slot of the cache.
  """
  rng = np.random.default_rng(4)
  shape = (_CASE.num_heads, 2 * _LENGTH)
  table = rng.standard_normal(shape, np.float32)

  def functions(table):
    return {
      "score_mod": lambda x, b, n, t, s: x * (1.0 + 0.5 * b) + table[n, t - s],
      "mask_mod": lambda b, n, t, s: (t - s + n + b) % 3 != 1,
    }

  case = _CASE._replace(options=("relative_bias", "relative_keys_by_head"))
  case = case.limited(mechanism.supports)
  variables, cache, qkv = _start(mechanism, case)
  _, tables = mechanism.draw(case)
  scanned = _scanned(mechanism, **functions(jnp.asarray(table)))
  out, _ = scanned(variables, cache, qkv, tables)
  call = {**tables, **functions(table)}
  assert_close(out, _causal(mechanism, variables, qkv, **call), 1e-5)


@law("decode", every_setting=False)
def decoding_in_bfloat16(mechanism: Mechanism) -> None:
  """A cache in bfloat16 must give the definition within 2e-2.

  Keep sums, logits and normalisers in float32.
  """
  case = _CASE._replace(num_kv_heads=_CASE.num_heads)
  variables, cache, qkv = _start(mechanism, case, jnp.bfloat16)
  out, _ = _shared_scan(mechanism)(variables, cache, qkv, {})
  require(
    out.dtype == jnp.bfloat16,
    f"the result is {out.dtype}, expected the dtype of query, bfloat16",
  )
  assert_close(out, _causal(mechanism, variables, qkv), 2e-2)


@law("decode")
def decoding_from_gathered_caches(mechanism: Mechanism) -> None:
  """Examples of a batch may be at different positions.

  Beam search gathers caches along axis 0. Count positions for each example,
  `index [B]`.
  """
  variables, empty, qkv = _start(mechanism)
  expected = _causal(mechanism, variables, qkv)
  _, early = _decode(mechanism, variables, empty, [x[:, :4] for x in qkv])
  _, late = _decode(mechanism, variables, early, [x[:, 4:8] for x in qkv])
  require(
    all(leaf.shape[0] == _CASE.batch for leaf in jax.tree.leaves(late)),
    "a leaf of the cache has another first axis than B",
  )
  late, early = jax.device_get((late, early))
  swapped = jax.tree.map(lambda a, b: np.stack([a[1], b[0]]), late, early)
  rest = [np.stack([x[1, 8:12], x[0, 4:8]]) for x in qkv]
  out, _ = _decode(mechanism, variables, swapped, rest)
  assert_close(out[0], expected[1, 8:12], 1e-5, "the example further ahead")
  assert_close(out[1], expected[0, 4:8], 1e-5, "the example further behind")


@law("decode", where=lambda mechanism: mechanism.record.prefill is not None)
def decoding_from_a_prompt(mechanism: Mechanism) -> None:
  """`prefill` must make the cache that decoding position after position makes.

  An example has its own length, and what lies beyond it is not a token.
  """
  variables, empty, qkv = _start(mechanism)
  expected = _causal(mechanism, variables, qkv)
  prefill = jax.jit(mechanism.prefill)
  for first, second in ((1, 8), (7, 3)):
    lengths = np.array([first, second])
    cache = prefill(variables, empty, [x[:, :8] for x in qkv], lengths)
    require(
      jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty),
      "prefill returns a cache of other shapes than it got",
    )
    at = (lengths[:, None] + np.arange(4))[..., None, None]
    rest = [np.take_along_axis(x, at, axis=1) for x in qkv]
    out, _ = _decode(mechanism, variables, cache, rest)
    wanted = np.take_along_axis(expected, at, axis=1)
    assert_close(out, wanted, 1e-5, f"after prompts of {lengths}")


@law("decode")
def decoding_cache_size(mechanism: Mechanism) -> None:
  """A cache must grow in proportion to max_length or not at all.

  cache='length' or cache='nothing' says which one is meant.
  """
  dims = Case(length=512).dims
  variables = mechanism.variables(dims)

  def size(length):
    sizes = 2, length, dims, jnp.float32
    cache = jax.eval_shape(lambda: mechanism.init_cache(variables, *sizes))
    # The positions are counted apart: 4 bytes an example in any case.
    leaves = [x for x in jax.tree.leaves(cache) if x.dtype != jnp.int32]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  growth = {"length": [8], "nothing": [1], None: [1, 8]}[mechanism.cache]
  require(
    size(512) in [times * size(64) for times in growth],
    f"the cache takes {size(64)} bytes for max_length 64 and {size(512)} for "
    f"512, expected {' or '.join(map(str, growth))} times as many",
  )


CHECKS = (
  decoding_equals_the_causal_call,
  decoding_is_compiled_once,
  decoding_with_relative_positions,
  decoding_with_functions_of_indices,
  decoding_in_bfloat16,
  decoding_from_gathered_caches,
  decoding_from_a_prompt,
  decoding_cache_size,
)
