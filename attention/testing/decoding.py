"""Laws of decoding: one position after another, it equals the causal call."""

import functools
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
from attention.testing.mechanism import Mechanism, law

_LENGTH = 12
_CASE = Case(length=_LENGTH, value_dim=5)


def _start(
  mechanism: Mechanism, case: Case = _CASE, dtype: Any = np.float32
) -> tuple[Any, Any, list, dict[str, Any]]:
  """Returns variables, an empty cache, query, key and value, and options."""
  case = mechanism.limited(case)
  qkv, call = mechanism.draw(case)
  if "own_keys" in mechanism.supports:
    del qkv[2:]  # The cache does not store separate values.
  dims = case.dims._replace(value_dim=case.value_dim)
  variables = mechanism.variables(dims)
  sizes = case.batch, case.length, dims, dtype
  cache = mechanism.decoder("init_cache")(variables, *sizes)
  return variables, cache, [x.astype(dtype) for x in qkv], call


def _causal(mechanism, variables, qkv, **call):
  """Evaluates the definition for the causal call on the whole sequence."""
  return mechanism.define(variables, qkv, is_causal=True, **call)


@functools.lru_cache(maxsize=2)
def _step(mechanism):
  """The compiled decoding of one position, and a list that grows with each trace."""
  traces = []

  @jax.jit
  def step(variables, cache, qkv):
    traces.append(None)
    return mechanism.decoder("decode")(variables, cache, *mechanism.three(qkv))

  return step, traces


def _steps(mechanism, variables, cache, qkv):
  """Decodes one position at a time; returns the results and the cache."""
  step, _ = _step(mechanism)
  outs = []
  for t in range(qkv[0].shape[1]):
    out, cache = step(variables, cache, [x[:, t : t + 1] for x in qkv])
    outs.append(out)
  return np.concatenate(outs, axis=1), cache


@law("decode")
def decoding_equals_the_causal_call(mechanism: Mechanism) -> None:
  """Decoding in `jax.lax.scan` must equal the causal call.

  This also holds with scale, relative_bias, relative_keys and relative_queries, and with
  score_mod and mask_mod, if `supports` has them; in these functions, t is the position
  of the query, and s are the positions of the keys in the cache. Values have the width
  `Dims.value_dim`. Every leaf of the cache has a leading axis B, and its shape and
  dtype do not change. Frequent causes: the new key is written to a neighbouring row of
  the cache, empty rows are not masked, query head n does not use key head n // (N/K),
  or an example depends on others of its batch.
  """
  names = (
    "scale",
    "relative_bias",
    "relative_keys_by_head",
    "relative_queries_by_head",
  )
  case = _CASE._replace(options=names, num_kv_heads=1)
  variables, cache, qkv, tables = _start(mechanism, case)
  rng = np.random.default_rng(4)
  table = rng.standard_normal((case.num_heads, 2 * _LENGTH), np.float32)

  def options(table):
    mods = {
      "score_mod": lambda x, b, n, t, s: x * (1.0 + 0.5 * b) + table[n, t - s],
      "mask_mod": lambda b, n, t, s: (t - s + n + b) % 3 != 1,
    }
    return {**tables, **(mods if "mods" in mechanism.supports else {})}

  run = mechanism.decoder("decode")

  @jax.jit
  def decode(variables, cache, qkv):
    call = options(jnp.asarray(table))
    call |= {
      name: jnp.asarray(x) for name, x in tables.items() if name != "scale"
    }

    def step(cache, position):
      arrays = mechanism.three([x[:, None] for x in position])
      out, cache = run(variables, cache, *arrays, **call)
      return cache, out[:, 0]

    positions = [jnp.moveaxis(x, 1, 0) for x in qkv]
    cache, outs = jax.lax.scan(step, cache, positions)
    return jnp.moveaxis(outs, 0, 1), cache

  out, after = decode(variables, cache, qkv)
  out = np.asarray(out)
  call = options(table)
  name = f"the result of decoding with {', '.join(call) or 'no options'}"
  assert_close(out, _causal(mechanism, variables, qkv, **call), 1e-5, name)
  require(
    jax.tree.structure(after) == jax.tree.structure(cache),
    "decode returns a cache of another structure than it got",
  )
  changed = [np.stack([x[0], np.full_like(x[1], 1e4)]) for x in qkv]
  changed_out, _ = decode(variables, cache, changed)
  assert_same_bits(
    changed_out[0],
    out[0],
    "example 0 changes when example 1 of the batch does",
  )


@law("decode")
def decoding_is_compiled_once(mechanism: Mechanism) -> None:
  """All steps of decoding must share one compiled program.

  A cache must keep its structure, shapes and dtypes from step to step. In bfloat16,
  results must equal the definition within 2e-2: keep sums, logits and normalisers in
  float32.
  """
  _, traces = _step(mechanism)
  half = _CASE._replace(num_kv_heads=_CASE.num_heads), jnp.bfloat16, 2e-2
  for case, dtype, tolerance in ((_CASE, np.float32, 1e-5), half):
    variables, cache, qkv, _ = _start(mechanism, case, dtype)
    before = len(traces)
    out, _ = _steps(mechanism, variables, cache, qkv)
    require(
      out.dtype == jnp.dtype(dtype),
      f"the result is {out.dtype}, expected the dtype of query, "
      f"{jnp.dtype(dtype)}",
    )
    assert_close(out, _causal(mechanism, variables, qkv), tolerance)
    count = len(traces) - before
    message = f"{_LENGTH} steps were traced {count} times, expected once"
    require(count <= 1, message)


@law("decode")
def decoding_from_gathered_caches(mechanism: Mechanism) -> None:
  """Examples of a batch may be at different positions.

  Beam search gathers caches along axis 0. Count positions for each example,
  `index [B]`.
  """
  variables, empty, qkv, _ = _start(mechanism)
  expected = _causal(mechanism, variables, qkv)
  _, early = _steps(mechanism, variables, empty, [x[:, :4] for x in qkv])
  _, late = _steps(mechanism, variables, early, [x[:, 4:8] for x in qkv])
  require(
    all(leaf.shape[0] == _CASE.batch for leaf in jax.tree.leaves(late)),
    "the first axis of an array of the cache is not B",
  )
  late, early = jax.device_get((late, early))
  swapped = jax.tree.map(lambda a, b: np.stack([a[1], b[0]]), late, early)
  rest = [np.stack([x[1, 8:12], x[0, 4:8]]) for x in qkv]
  out, _ = _steps(mechanism, variables, swapped, rest)
  assert_close(out[0], expected[1, 8:12], 1e-5, "the example further ahead")
  assert_close(out[1], expected[0, 4:8], 1e-5, "the example further behind")


@law("decode", where=lambda mechanism: mechanism.record.prefill is not None)
def decoding_from_a_prompt(mechanism: Mechanism) -> None:
  """`prefill` must fill the cache as decoding position by position does.

  The examples have prompts of different lengths, also of 0, padded with NaN. The arrays
  of the cache keep their shapes and dtypes, in bfloat16 as well.
  """
  variables, empty, qkv, _ = _start(mechanism)
  expected = _causal(mechanism, variables, qkv)
  prefill = jax.jit(mechanism.decoder("prefill"))
  kinds = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
  for lengths in map(np.array, ([0, 8], [7, 3], [1, 8], [5, 5])):
    beyond = np.arange(8) >= lengths[:, None]
    prompt = [np.where(beyond[..., None, None], np.nan, x[:, :8]) for x in qkv]
    prompt = mechanism.three([x.astype(np.float32) for x in prompt])
    cache = prefill(variables, empty, *prompt, lengths)
    half = _start(mechanism, dtype=jnp.bfloat16)[1]
    halves = mechanism.three([x[:, :8].astype(jnp.bfloat16) for x in qkv])
    filled = jax.eval_shape(prefill, variables, half, *halves, lengths)
    for got, given in ((cache, empty), (filled, half)):
      require(
        kinds(got) == kinds(given),
        "the shapes and dtypes of the cache that prefill returns, "
        f"{kinds(got)}, differ from those that it got, {kinds(given)}",
      )
    at = (lengths[:, None] + np.arange(4))[..., None, None]
    rest = [np.take_along_axis(x, at, axis=1) for x in qkv]
    out, _ = _steps(mechanism, variables, cache, rest)
    rest_expected = np.take_along_axis(expected, at, axis=1)
    assert_close(out, rest_expected, 1e-5, f"after prompts of {lengths}")


@law("decode", where=lambda mechanism: mechanism.cache == "length")
def decoding_past_the_end(mechanism: Mechanism) -> None:
  """Decoding with a full cache must raise a ValueError that names the cache.

  So must `prefill` for a prompt that is longer than the cache.

  If the index is traced, the result must be NaN for examples whose cache is full, and
  for no others. A factory decorated with `attention_factory` does both for a cache with
  `grows = True`.
  """
  variables, empty, qkv, _ = _start(mechanism)
  expected = _causal(mechanism, variables, qkv)
  _, full = _steps(mechanism, variables, empty, qkv)
  _, early = _steps(mechanism, variables, empty, [x[:, :4] for x in qkv])
  mixed = jax.tree.map(lambda x, y: np.stack([x[0], y[1]]), full, early)
  now = [x[:, 4:5] for x in qkv]
  out, _ = _steps(mechanism, variables, mixed, now)
  require(np.isnan(out[0]).all(), "a full cache gives numbers, expected NaN")
  assert_close(out[1], expected[1, 4:5], 1e-5, "an example beside a full cache")
  calls: dict[str, tuple] = {"decode": (full, now, ())}
  if mechanism.record.prefill is not None:
    longer = [np.concatenate([x, x[:, :1]], axis=1) for x in qkv]
    calls["prefill"] = empty, longer, (np.array([_LENGTH + 1, 1]),)
  for name, (cache, arrays, lengths) in calls.items():
    call = functools.partial(mechanism.decoder(name), variables, cache)
    try:
      call(*mechanism.three(arrays), *lengths)
    except ValueError as error:
      is_named = str(error).startswith("cache: ")
      require(is_named, f"{name} with a full cache raises {error!r}")
    else:
      require(False, f"{name} accepts a full cache, expected ValueError")


@law("decode")
def decoding_cache_size(mechanism: Mechanism) -> None:
  """A cache must grow by the same number of bytes for each position, or not at all.

  cache='length' or cache='nothing' declares which of the two holds.
  """
  dims = Case(length=512).dims
  variables = mechanism.variables(dims)

  def size(length):
    sizes = 2, length, dims, jnp.float32
    cache = jax.eval_shape(
      lambda: mechanism.decoder("init_cache")(variables, *sizes)
    )
    # Without the positions, which are 4 bytes per example in any case.
    leaves = [x for x in jax.tree.leaves(cache) if x.dtype != jnp.int32]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  sizes = {length: size(length) for length in (64, 256, 512)}
  growth = np.diff([*sizes.values()])
  is_linear = growth[0] > 0 and 3 * growth[1] == 4 * growth[0]
  fits: dict[Any, bool] = {"length": is_linear, "nothing": not growth.any()}
  fits[None] = any(fits.values())
  require(
    fits[mechanism.cache],
    f"the cache has these bytes for each max_length: {sizes}, expected growth "
    f"with {mechanism.cache or 'the length or with nothing'}",
  )
