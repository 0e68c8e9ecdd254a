"""Attention inside Flax's own linen and nnx multi-head modules."""

import functools

from flax import linen, nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  Dims,
  as_attention_fn,
  dense,
  dense_attention,
  gates_from_keys,
  linear,
  linformer,
  linformer_attention,
  performer,
  performer_attention,
  sliding_window,
  sliding_window_attention,
)
from attention.testing import assert_close
from tests.attention.calls import normal, random_mask
from tests.refusals import assert_refused

FEATURES, HEADS, LENGTH = 16, 2, 6
INPUTS, PROJECTION = normal((3, LENGTH, FEATURES), (8, FEATURES // HEADS))
KEPT = np.arange(LENGTH)[None] < np.array([[6], [4], [2]])
KEY_MASK = jnp.asarray(KEPT[:, None, None])
MASK = jnp.asarray(np.broadcast_to(KEPT[:, None, None], (3, 1, 6, 6)))
CAUSAL = jnp.asarray(np.broadcast_to(np.tri(LENGTH, dtype=bool), (3, 1, 6, 6)))
DIMS = Dims(HEADS, HEADS, FEATURES // HEADS, LENGTH)
DENSE = as_attention_fn(dense())
FUNCTIONS = {
  "sliding_window": (sliding_window_attention, {"window": 2}),
  "performer": (performer_attention, {"projection": PROJECTION}),
  "linformer": (linformer_attention, {"key_projection": PROJECTION[:6]}),
}


def drawn(tree):
  """Random arrays in place of shapes, the same in every process."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda x: np.asarray(rng.standard_normal(x.shape) / 4, x.dtype), tree
  )


@functools.cache
def linen_program(attention_fn, settings, call):
  """The module, whose parameters are the same whatever it attends by, compiled."""
  settings = {"num_heads": HEADS, **dict(settings)}
  plain = linen.MultiHeadDotProductAttention(**settings)
  if attention_fn is not None:
    settings["attention_fn"] = attention_fn
  module = linen.MultiHeadDotProductAttention(**settings)

  @jax.jit
  def run(inputs, mask, rngs):
    init = functools.partial(plain.init, deterministic=True)
    shapes = jax.eval_shape(init, jax.random.key(0), inputs)
    options = {"mask": mask, "rngs": rngs, **dict(call)}
    return module.apply(drawn(shapes), inputs, **options)

  return run


def run_linen(
  attention_fn, inputs=INPUTS, rngs=None, settings=None, mask=None, **call
):
  """The module's output; its parameters are the same whatever it attends by."""
  settings = tuple((settings or {}).items())
  program = linen_program(attention_fn, settings, tuple(call.items()))
  return program(inputs, mask, rngs)


def nnx_module(attention_fn, **settings):
  settings = {"decode": False, **settings}
  if attention_fn is not None:
    settings["attention_fn"] = attention_fn
  return nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **settings)


@functools.cache
def nnx_program(attention_fn, settings, call):
  module = nnx_module(attention_fn, **dict(settings))

  @jax.jit
  def run(inputs, mask, rngs):
    rngs = None if rngs is None else nnx.Rngs(**rngs)
    return module(inputs, mask=mask, rngs=rngs, **dict(call))

  return run


def run_nnx(
  attention_fn, inputs=INPUTS, rngs=None, settings=None, mask=None, **call
):
  """As `run_linen`."""
  settings = tuple((settings or {}).items())
  program = nnx_program(attention_fn, settings, tuple(call.items()))
  return program(inputs, mask, rngs)


both_modules = pytest.mark.parametrize("run", [run_linen, run_nnx])


@both_modules
def test_dense_equals_the_modules_own(run):
  for mask, full in (
    (None, None),
    (CAUSAL, CAUSAL),
    (MASK, MASK),
    (KEY_MASK, MASK),
  ):
    assert_close(run(DENSE, mask=mask), run(None, mask=full), 1e-6)
  fn = as_attention_fn(dense_attention)
  assert_close(run(fn, mask=MASK), run(None, mask=MASK), 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@both_modules
def test_other_mechanisms_see_the_mask(run, name):
  function, options = FUNCTIONS[name]
  fn = as_attention_fn(function, **options)

  def direct(query, key, value, **_):
    return function(query, key, value, mask=KEY_MASK, **options)

  out = run(fn, mask=KEY_MASK)
  assert_close(out, run(direct), 1e-6)
  assert np.abs(out - run(fn)).max() > 1e-3


@both_modules
def test_a_record_brings_its_variables(run):
  attention = performer(num_features=8)
  fn = as_attention_fn(attention, {"constants": {"projection": PROJECTION}})
  expected = run(as_attention_fn(performer_attention, projection=PROJECTION))
  assert_close(run(fn), expected, 1e-6)


def test_is_causal():
  """As an option, and as an argument of nnx's module."""
  causal = as_attention_fn(dense_attention, is_causal=True)
  assert_close(run_linen(causal), run_linen(None, mask=CAUSAL), 1e-6)
  expected = run_nnx(None, is_causal=True)
  assert_close(run_nnx(causal), expected, 1e-6)
  assert_close(run_nnx(DENSE, is_causal=True), expected, 1e-6)
  projections = dict.fromkeys(
    ("key_projection", "value_projection"), PROJECTION[:6, :3]
  )
  fn = as_attention_fn(linformer(rank=3), {"params": projections})
  with pytest.raises(ValueError, match=r"^is_causal: "):
    run_nnx(fn, is_causal=True)


@pytest.mark.parametrize("name", FUNCTIONS)
@both_modules
def test_a_mask_along_queries_raises_where_it_cannot_be_honoured(run, name):
  function, options = FUNCTIONS[name]
  fn = as_attention_fn(function, **options)
  with pytest.raises(
    ValueError, match=r"^mask: .*key_mask\[:, None, None, :\]"
  ):
    run(fn, mask=MASK)


@both_modules
def test_leading_axes(run):
  lead = (2, 3)
  (inputs,) = normal((*lead, LENGTH, FEATURES), seed=3)
  keep = np.array(random_mask(*lead, 1, 1, LENGTH))
  keep[..., 0] = True
  # nnx's own does not broadcast the leading axes of a mask.
  for mask in (keep, CAUSAL[:1, None], CAUSAL[0]):
    full = np.broadcast_to(mask, (*lead, 1, LENGTH, LENGTH))
    expected = run(None, inputs, mask=jnp.asarray(full))
    assert_close(run(DENSE, inputs, mask=jnp.asarray(mask)), expected, 1e-6)


def test_leading_axes_that_differ_are_named():
  query = jnp.ones((2, 3, 2, 4))
  assert_refused(
    lambda **call: DENSE(query, **{"key": query, "value": query} | call),
    {"mask": jnp.ones((1, 2, 1, 3, 3))},
    {"mask": jnp.ones((3, 1, 3, 3))},
    {"bias": jnp.ones((3, 1, 3, 3))},
    {"key": jnp.ones((3, 3, 2, 4))},
    {"value": jnp.ones((1, 3, 2, 4))},
  )
  # As many in all, in another order.
  query, other = jnp.ones((2, 3, 5, 2, 4)), jnp.ones((3, 2, 5, 2, 4))
  assert_refused(
    lambda **call: DENSE(query, **{"key": query, "value": query} | call),
    {"key": other},
    {"value": other},
  )


def test_bias():
  query, key, value, bias = normal(*[(2, 5, 2, 4)] * 3, (1, 2, 5, 5))
  expected, got, fixed = (
    jax.jit(functools.partial(f, **options))(query, key, value)
    for f, options in (
      (linen.dot_product_attention, {"bias": bias}),
      (DENSE, {"bias": bias}),
      (as_attention_fn(dense(), bias=bias), {}),
    )
  )
  assert_close(got, expected, 1e-6)
  assert_close(fixed, expected, 1e-6)
  with pytest.raises(ValueError, match=r"^bias: expected one"):
    as_attention_fn(dense(), bias=bias)(query, key, value, bias=bias)
  window = as_attention_fn(sliding_window(window=2))
  with pytest.raises(ValueError, match=r"^bias: "):
    window(query, key, value, bias=bias)


@both_modules
def test_dropout(run):
  settings = {"dropout_rate": 0.5, "broadcast_dropout": False}

  def call(fn, deterministic, seed=0, settings=settings):
    rngs = {"dropout": jax.random.key(seed)}
    return run(fn, settings=settings, deterministic=deterministic, rngs=rngs)

  quiet = call(DENSE, deterministic=True)
  assert_close(quiet, call(None, deterministic=True), 1e-6)
  noisy = call(DENSE, deterministic=False)
  assert (noisy == call(DENSE, deterministic=False)).all()
  for other in (quiet, call(DENSE, deterministic=False, seed=1)):
    assert np.abs(noisy - other).max() > 1e-3
  alike = call(DENSE, deterministic=False, settings={"dropout_rate": 0.5})
  for other in (quiet, noisy):
    assert np.abs(alike - other).max() > 1e-3
  sums = as_attention_fn(linear())
  call(sums, deterministic=True)
  with pytest.raises(
    ValueError, match=r"^dropout_r.*: linear_attention has no"
  ):
    call(sums, deterministic=False)


@both_modules
def test_dtype(run):
  out = run(DENSE, settings={"dtype": jnp.bfloat16})
  assert out.dtype == jnp.bfloat16
  assert_close(out, run(None, settings={"dtype": jnp.bfloat16}), 2e-2)


def test_the_dtype_of_a_call_is_that_of_the_arrays():
  seen = []

  def spy(query, key, value, **call):
    seen.extend(x.dtype for x in (query, key, value))
    return dense_attention(query, key, value, **call)

  fn = as_attention_fn(functools.wraps(dense_attention)(spy))
  run = functools.partial(fn, dtype=jnp.bfloat16)
  jax.eval_shape(run, *[jnp.ones((1, 2, 1, 4))] * 3)
  assert set(seen) == {jnp.dtype(jnp.bfloat16)}


def test_what_flax_may_ask_and_ours_has_not():
  hooks = {
    "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
    "attn_weights_value_einsum_cls": lambda: jnp.einsum,
  }
  precise = {"precision": "highest"}
  for run, fn, settings, message in (
    (run_linen, DENSE, precise, "^precision: expected None"),
    (run_nnx, DENSE, precise, "^precision: expected None"),
    (run_linen, DENSE, hooks, "^qk_attn_weights_einsum: "),
  ):
    with pytest.raises(ValueError, match=message):
      run(fn, settings=settings)


SOWS = {"sow_weights": True, "mutable": ("intermediates",)}


def sown(fn, inputs=INPUTS, **call):
  """The weights that linen's module has sown."""
  _, state = run_linen(fn, inputs, **SOWS, **call)
  (weights,) = state["intermediates"]["attention_weights"]
  return weights


def test_sowing_the_weights_in_linen():
  (inputs,) = normal((2, 3, LENGTH, FEATURES))
  for given, mask in ((INPUTS, CAUSAL), (inputs, CAUSAL[:1, None])):
    got, expected = (sown(fn, given, mask=mask) for fn in (DENSE, None))
    assert_close(got, expected, 1e-6)


@pytest.mark.parametrize("is_forced", [False, True])
def test_sown_weights_have_the_dtype_of_flax(is_forced):
  settings = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": is_forced}
  got, expected = (sown(fn, settings=settings) for fn in (DENSE, None))
  assert got.dtype == expected.dtype
  assert_close(got, expected, 1e-2)
  sums = np.asarray(got, np.float64).sum(axis=-1)
  assert_close(sums, np.ones_like(sums), 1e-6 if is_forced else 1e-2)


def test_sowing_the_weights_in_nnx():
  found = []
  for fn in (DENSE, None):
    capture = nnx.capture(
      lambda module: module(INPUTS, sow_weights=True), nnx.Intermediate
    )
    _, state = capture(nnx_module(fn))
    found += nnx.to_pure_dict(state)["attention_weights"]
  assert_close(*found, 1e-6)


def test_sown_weights_are_those_of_the_mechanism():
  fn = as_attention_fn(sliding_window(window=1), is_causal=True)
  band = np.tri(LENGTH) - np.tri(LENGTH, k=-2)
  np.testing.assert_array_equal(
    np.asarray(sown(fn)) > 0, band * np.ones((3, HEADS, 1, 1)) > 0
  )


def test_sown_weights_leave_dropout_out():
  weights = sown(
    DENSE,
    settings={"dropout_rate": 0.5, "broadcast_dropout": False},
    deterministic=False,
    rngs={"dropout": jax.random.key(0)},
  )
  sums = np.sum(weights, axis=-1)
  assert_close(sums, np.ones_like(sums), 1e-5)


def decode_linen(fn):
  """Six cached steps of linen's decoder."""
  module = linen.MultiHeadDotProductAttention(
    num_heads=HEADS, attention_fn=fn, decode=True
  )
  shapes = jax.eval_shape(module.init, jax.random.key(2), INPUTS)
  cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes["cache"])
  params = drawn({"params": shapes["params"]})

  @jax.jit
  def step(cache, x):
    state = {**params, "cache": cache}
    out, state = module.apply(state, x, mutable=["cache"])
    return out, state["cache"]

  outs = []
  for t in range(LENGTH):
    out, cache = step(cache, INPUTS[:, t : t + 1])
    outs.append(out)
  return np.concatenate(outs, axis=1)


@pytest.mark.parametrize("name", ["dense", "performer"])
def test_cached_decoding_in_linen(name):
  attention = ATTENTIONS[name]()
  init = functools.partial(attention.init, dims=DIMS)
  variables = drawn(jax.eval_shape(init, jax.random.key(0)))
  expected = run_linen(as_attention_fn(attention, variables, is_causal=True))
  got = decode_linen(as_attention_fn(attention, variables))
  assert_close(got, expected, 1e-5)


def test_cached_decoding_in_nnx():
  module = nnx_module(DENSE, decode=True)
  module.init_cache(INPUTS.shape)
  outs = [module(INPUTS[:, t : t + 1]) for t in range(LENGTH)]
  expected = run_nnx(None, is_causal=True)
  assert_close(np.concatenate(outs, axis=1), expected, 1e-5)


@pytest.mark.parametrize(
  "fn",
  [
    as_attention_fn(dense(), is_causal=True),
    as_attention_fn(sliding_window(window=2)),
    as_attention_fn(dense_attention),
  ],
)
def test_cached_decoding_raises_where_positions_are_lost(fn):
  with pytest.raises(ValueError, match=r"^query: .*'rowwise'"):
    decode_linen(fn)


def test_what_belongs_to_the_module_is_no_option():
  names = "mask", "dropout_rate", "dropout_rng"
  options = [{name: None} for name in names]
  assert_refused(functools.partial(as_attention_fn, dense()), *options)
  mask, ones = jnp.ones((1, 1, 1, 1), bool), jnp.ones((1, 1, 2, 8))
  bound = functools.partial(dense_attention, mask=mask)
  assert_refused(functools.partial(as_attention_fn, bound), ("mask", {}))
  pair = functools.partial(
    as_attention_fn(dense_attention, return_lse=True), *(ones,) * 3
  )
  assert_refused(pair, ("attention", {}))
  of_function = functools.partial(as_attention_fn, dense_attention)
  assert_refused(of_function, {"variables": {}})


def test_an_unknown_option_raises():
  for attention in (dense(), dense_attention):
    attend = functools.partial(as_attention_fn, attention)
    assert_refused(lambda x=attend, **y: run_linen(x(**y)), {"widnow": 3})
  assert_refused(
    functools.partial(as_attention_fn, dense_attention), {"window": 3}
  )


def test_a_function_of_ones_own_is_asked_for_what_it_has():
  def plain(query, key, value, *, mask=None, scale=None):
    return dense_attention(query, key, value, mask=mask, scale=scale)

  fn = as_attention_fn(plain)
  assert_close(run_linen(fn, mask=MASK), run_linen(None, mask=MASK), 1e-6)
  with pytest.raises(
    ValueError, match=r"^bias: plain has no such option; it has"
  ):
    fn(INPUTS, INPUTS, INPUTS, bias=jnp.zeros(()))


@both_modules
def test_a_partial_is_its_function(run):
  partial = functools.partial(performer_attention, projection=PROJECTION)
  expected = run(as_attention_fn(performer_attention, projection=PROJECTION))
  assert_close(run(as_attention_fn(partial)), expected, 1e-6)
  with pytest.raises(ValueError, match=r"^widnow: performer_attention has no"):
    as_attention_fn(partial, widnow=3)
  with pytest.raises(ValueError, match=r"expected None for the function perf"):
    as_attention_fn(partial, {})


def test_something_else_is_no_attention(unchecked):
  with pytest.raises(ValueError, match=r"^attention: expected .*, got str$"):
    as_attention_fn("dense")
  for factory in (performer, linear):
    with pytest.raises(ValueError, match=rf"an array; call {factory.__name__}"):
      as_attention_fn(factory)(INPUTS, INPUTS, INPUTS)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_variables_that_are_missing_are_named(name):
  attention = gates_from_keys(ATTENTIONS[name]())
  dims = DIMS._replace(max_length=2048, features=FEATURES)
  init = functools.partial(attention.init, dims=dims)
  made = jax.eval_shape(init, jax.random.key(0))
  if not made:
    as_attention_fn(attention)
    return
  ((collection, arrays),) = made.items()
  for array in arrays:
    with pytest.raises(ValueError, match=f"^variables: .*{collection}.{array}"):
      as_attention_fn(attention)
  as_attention_fn(attention, made)


def test_gates_need_inputs_that_flax_does_not_give():
  with pytest.raises(ValueError, match=r"^attention: its gates .*gates_fr"):
    as_attention_fn(ATTENTIONS["gated_delta"]())


def test_grouped_heads_in_nnx():
  settings = {"num_kv_heads": 1}
  got, expected = (run_nnx(fn, settings=settings) for fn in (DENSE, None))
  assert_close(got, expected, 1e-6)
