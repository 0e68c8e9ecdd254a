"""Decoding one position at a time equals the causal call."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention.plug import Dims
from attention.testing.calls import (
  Case,
  assert_close,
  assert_same_bits,
  require,
)
from attention.testing.check import Check
from attention.testing.mechanism import Mechanism, in_float64, shared

_LENGTH = 12
_CASE = Case(length=_LENGTH)


def _empty(
  mechanism: Mechanism, batch: int, max_length: int, dims: Dims, dtype: Any
) -> Any:
  """An empty cache."""
  attention = mechanism.attention
  if attention.init_cache is None or attention.decode is None:
    raise AssertionError(
      "`supports` names 'decode' but init_cache or decode is None"
    )
  variables = mechanism.variables(dims)
  return attention.init_cache(variables, batch, max_length, dims, dtype)


def _start(
  mechanism: Mechanism, case: Case, dtype: Any = np.float32
) -> tuple[Any, Any, list]:
  """Variables, an empty cache, and query, key and value."""
  sizes = (case.batch, case.length, case.dims, dtype)
  cache = mechanism.once(("cache", *sizes), _empty, mechanism, *sizes)
  qkv = [x.astype(dtype) for x in mechanism.draw(case, cached=True)[0]]
  return mechanism.variables(case.dims), cache, qkv


@shared
def _causal(mechanism, case):
  """The causal call on the whole sequence."""
  arrays, call = mechanism.draw(case, cached=True)
  apply = jax.jit(partial(mechanism.attention.apply, is_causal=True))
  return np.asarray(apply(mechanism.variables(case.dims), *arrays, **call))


@shared
def _scanned(mechanism):
  """The jitted `(variables, cache, qkv, tables) -> (out, cache)`."""

  @jax.jit
  def run(variables, cache, qkv, tables):
    def step(cache, at):
      out, cache = mechanism.attention.decode(
        variables, cache, *(x[:, None] for x in at), **tables
      )
      return cache, out[:, 0]

    in_time = [jnp.moveaxis(x, 1, 0) for x in qkv]
    cache, outs = jax.lax.scan(step, cache, in_time)
    return jnp.moveaxis(outs, 0, 1), cache

  return run


@shared
def _stepped(mechanism):
  """Jitted decoding of one position, and a list that grows with each trace."""
  traces = []

  @jax.jit
  def step(variables, cache, qkv):
    traces.append(None)
    return mechanism.attention.decode(variables, cache, *qkv)

  return step, traces


def _decode(mechanism, variables, cache, qkv):
  """Decodes position after position, as `_scanned` without the scan."""
  step, _ = _stepped(mechanism)
  outs = []
  for t in range(qkv[0].shape[1]):
    out, cache = step(variables, cache, [x[:, t : t + 1] for x in qkv])
    outs.append(out)
  return np.concatenate(outs, axis=1), cache


def _under_scan(mechanism: Mechanism, num_kv_heads: int) -> None:
  """Steps under `lax.scan`, which wants a cache of constant form."""
  case = _CASE._replace(num_kv_heads=num_kv_heads)
  variables, cache, qkv = _start(mechanism, case)
  out, after = _scanned(mechanism)(variables, cache, qkv, {})
  assert_close(out, _causal(mechanism, case), 1e-5)
  require(
    jax.tree.structure(after) == jax.tree.structure(cache),
    "decode returns a cache of another structure than it got",
  )


def _step_by_step(mechanism: Mechanism) -> None:
  """Steps that are compiled once, as a generating program calls them."""
  variables, cache, qkv = _start(mechanism, _CASE)
  _, traces = _stepped(mechanism)
  before = len(traces)
  out, _ = _decode(mechanism, variables, cache, qkv)
  assert_close(out, _causal(mechanism, _CASE), 1e-5)
  require(
    len(traces) <= before + 1,
    f"{_LENGTH} steps were traced {len(traces) - before} times, expected once",
  )


def _relative_positions(mechanism: Mechanism) -> None:
  """Tables by distance in decoding are those of the causal call."""
  for options in (("relative",), ("relative_bias", "relative_keys_by_head")):
    case = _CASE._replace(options=options)
    variables, cache, qkv = _start(mechanism, case)
    tables = mechanism.draw(case)[1]
    out, _ = _scanned(mechanism)(variables, cache, qkv, tables)
    assert_close(out, _causal(mechanism, case), 1e-5)


def _unrolled(mechanism, functions, variables, cache, qkv, tables):
  """Position after position."""
  outs = []
  for t in range(qkv[0].shape[1]):
    now = [x[:, t : t + 1] for x in qkv]
    out, cache = mechanism.attention.decode(
      variables, cache, *now, **tables, **functions
    )
    outs.append(out)
  return jnp.concatenate(outs, axis=1)


def _functions_of_indices(mechanism: Mechanism) -> None:
  """Functions of a score and its indices see the positions of the causal call."""
  rng = np.random.default_rng(4)
  shape = (_CASE.num_heads, 2 * _LENGTH)
  table = jnp.asarray(rng.standard_normal(shape, np.float32))

  def score_mod(score, b, n, t, s):
    return score * (1.0 + 0.5 * b) + table[n, t - s]

  def mask_mod(b, n, t, s):
    return (t - s + n + b) % 3 != 1

  functions = {"score_mod": score_mod, "mask_mod": mask_mod}
  relative = "relative" in mechanism.supports
  for options in ((), ("relative",)) if relative else ((),):
    case = _CASE._replace(options=options)
    variables, cache, qkv = _start(mechanism, case)
    tables = mechanism.draw(case)[1]

    run = jax.jit(partial(_unrolled, mechanism, functions))
    apply = jax.jit(
      partial(mechanism.attention.apply, is_causal=True, **functions)
    )
    assert_close(
      run(variables, cache, qkv, tables),
      apply(variables, *qkv, **tables),
      1e-5,
    )


def _bfloat16(mechanism: Mechanism) -> None:
  """A cache in bfloat16 loses no more than its digits."""
  variables, cache, qkv = _start(mechanism, _CASE, jnp.bfloat16)
  out, _ = _scanned(mechanism)(variables, cache, qkv, {})
  require(
    out.dtype == jnp.bfloat16,
    f"the result is {out.dtype}, expected the dtype of query, bfloat16",
  )
  variables, arrays = in_float64((variables, qkv))
  expected = mechanism.define(variables, *arrays, is_causal=True)
  assert_close(out, expected, 2e-2)


def _neighbours(mechanism: Mechanism) -> None:
  """Another example of the batch changes no bit."""
  variables, cache, qkv = _start(mechanism, _CASE)
  decode = _scanned(mechanism)
  before = np.asarray(decode(variables, cache, qkv, {})[0])
  for x in qkv:
    x[1] = 1e4
  after = np.asarray(decode(variables, cache, qkv, {})[0])
  assert_same_bits(
    after[0], before[0], "example 0 changes when example 1 of the batch does"
  )


def _gathered(mechanism: Mechanism) -> None:
  """Beam search reorders every leaf of a cache along its first axis."""
  variables, empty, qkv = _start(mechanism, _CASE)
  expected = _causal(mechanism, _CASE)
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


def _prefilled(mechanism: Mechanism) -> None:
  """Decoding goes on from a prompt that was read at once, of any length."""
  if mechanism.attention.prefill is None:
    return
  variables, empty, qkv = _start(mechanism, _CASE)
  expected = _causal(mechanism, _CASE)
  prefill = jax.jit(mechanism.attention.prefill)
  for first, second in ((1, 8), (7, 3)):
    lengths = np.array([first, second])
    cache = prefill(
      variables, empty, *(x[:, :8] for x in qkv), jnp.asarray(lengths)
    )
    require(
      jax.tree.map(jnp.shape, cache) == jax.tree.map(jnp.shape, empty),
      "prefill returns a cache of other shapes than it got",
    )
    at = lengths[:, None] + np.arange(4)
    rest = [np.take_along_axis(x, at[..., None, None], axis=1) for x in qkv]
    out, _ = _decode(mechanism, variables, cache, rest)
    wanted = np.take_along_axis(expected, at[..., None, None], axis=1)
    assert_close(out, wanted, 1e-5, f"after prompts of {lengths}")


def _cache_size(mechanism: Mechanism) -> None:
  """A cache grows with the length, or not at all."""
  dims = Case(length=512).dims

  def size(max_length):
    cache = jax.eval_shape(
      partial(_empty, mechanism, 2, max_length, dims, jnp.float32)
    )
    # The positions are counted apart: 4 bytes an example in any case.
    leaves = [x for x in jax.tree.leaves(cache) if x.dtype != jnp.int32]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  growth = {"length": [8], "nothing": [1], None: [1, 8]}[mechanism.cache]
  require(
    size(512) in [times * size(64) for times in growth],
    f"the cache takes {size(64)} bytes for max_length 64 and {size(512)} for "
    f"512, expected {' or '.join(map(str, growth))} times as many",
  )


def _decodes(name, law, advice, *needs, **facts):
  needs = frozenset({"decode", *needs})
  return Check(f"decoding_{name}", law, advice, needs, **facts)


_EQUAL = (
  "Decoding token by token from an empty cache must give what "
  "`apply(…, is_causal=True)` gives on the whole sequence. Every leaf of the "
  "cache has a leading axis B and a shape and dtype that stay. Frequent causes: "
  "the new key is written one place off, places that are not filled yet are not "
  "masked, query head n does not read key head n // (N/K)."
)

CHECKS = (
  *(
    _decodes(
      f"equals_the_causal_call[K{num_kv_heads}]",
      partial(_under_scan, num_kv_heads=num_kv_heads),
      _EQUAL,
    )
    for num_kv_heads in (1, 2, 4)
  ),
  _decodes("is_compiled_once", _step_by_step, _EQUAL),
  _decodes(
    "with_relative_positions",
    _relative_positions,
    "`decode` must take relative_bias and relative_keys as the causal call does.",
    "relative",
  ),
  _decodes(
    "with_functions_of_indices",
    _functions_of_indices,
    "`decode` must take score_mod and mask_mod as the causal call does: t is the "
    "position, and s that of the key in each slot of the cache.",
    "mods",
  ),
  _decodes(
    "in_bfloat16",
    _bfloat16,
    "A cache in bfloat16 must give the definition within 2e-2: keep sums, "
    "logits and normalisers in float32.",
    every_setting=False,
  ),
  _decodes(
    "keeps_examples_apart",
    _neighbours,
    "An example must not depend on others of its batch.",
  ),
  _decodes(
    "from_gathered_caches",
    _gathered,
    "Examples of a batch may be at different positions (beam search gathers "
    "caches along axis 0). Count positions for each example, `index [B]`.",
  ),
  _decodes(
    "from_a_prompt",
    _prefilled,
    "`prefill` must make the cache that `decode` of one position after another "
    "makes; an example has its own length, and what lies beyond it is not a token.",
  ),
  _decodes(
    "cache_size",
    _cache_size,
    "A cache must grow in proportion to max_length or not at all; "
    "cache='length' or cache='nothing' says which one is meant.",
  ),
)
