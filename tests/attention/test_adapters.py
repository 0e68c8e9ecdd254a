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
from tests.attention.forms import thorough

FEATURES, HEADS, LENGTH = 16, 2, 6
INPUTS = jax.random.normal(jax.random.key(0), (3, LENGTH, FEATURES))
KEY_MASK = jnp.arange(LENGTH)[None] < jnp.array([[6], [4], [2]])
DIMS = Dims(HEADS, HEADS, FEATURES // HEADS, LENGTH)
PROJECTION = jax.random.normal(jax.random.key(1), (8, FEATURES // HEADS))
DENSE = as_attention_fn(dense())
FUNCTIONS = {
  "sliding_window": (sliding_window_attention, {"window": 2}),
  "performer": (performer_attention, {"projection": PROJECTION}),
  "linformer": (linformer_attention, {"key_projection": PROJECTION[:6]}),
}


def run_linen(attention_fn, inputs=INPUTS, rngs=None, settings=None, **call):
  """The module's output; its parameters are the same whatever it attends by."""
  settings = {"num_heads": HEADS, **(settings or {})}
  plain = linen.MultiHeadDotProductAttention(**settings)
  deterministic = {"deterministic": True} if plain.dropout_rate else {}
  params = plain.init(jax.random.key(2), inputs, **deterministic)
  if attention_fn is not None:
    settings["attention_fn"] = attention_fn
  module = linen.MultiHeadDotProductAttention(**settings)
  return module.apply(params, inputs, rngs=rngs, **call)


def run_nnx(attention_fn, inputs=INPUTS, settings=None, **call):
  """As `run_linen`."""
  settings = {"decode": False, **(settings or {})}
  if attention_fn is not None:
    settings["attention_fn"] = attention_fn
  module = nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **settings)
  return module(inputs, **call)


both_modules = pytest.mark.parametrize("run", [run_linen, run_nnx])


@pytest.mark.parametrize(
  "mask",
  [
    None,
    linen.make_causal_mask(INPUTS[..., 0]),
    linen.make_attention_mask(jnp.ones_like(KEY_MASK), KEY_MASK),
    KEY_MASK[:, None, None, :],
  ],
  ids=["none", "causal", "attention", "key"],
)
@pytest.mark.parametrize("fn", [DENSE, as_attention_fn(dense_attention)])
@both_modules
def test_dense_equals_the_modules_own(run, fn, mask):
  assert_close(run(fn, mask=mask), run(None, mask=mask), 1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@both_modules
def test_other_mechanisms_see_the_mask(run, name):
  function, options = FUNCTIONS[name]
  mask = KEY_MASK[:, None, None, :]
  seen = []

  def spy(query, key, value, **call):
    seen.append((query, key, value))
    return function(query, key, value, **call)

  spy = functools.wraps(function)(spy)
  out = run(as_attention_fn(spy, **options), mask=mask)
  direct = function(*seen[0], mask=mask, **options)
  # The module's output projection is linear: compare through a stand-in.
  expected = run(lambda query, key, value, **_: direct)
  assert_close(out, expected, 1e-6)
  assert np.abs(out - run(as_attention_fn(function, **options))).max() > 1e-3


@both_modules
def test_a_record_brings_its_variables(run):
  attention = performer(num_features=8)
  variables = attention.init(jax.random.key(0), DIMS)
  fn = as_attention_fn(attention, variables)
  projection = variables["constants"]["projection"]
  expected = run(as_attention_fn(performer_attention, projection=projection))
  assert_close(run(fn), expected, 1e-6)


@both_modules
def test_is_causal_is_an_option(run):
  causal = as_attention_fn(dense_attention, is_causal=True)
  mask = linen.make_causal_mask(INPUTS[..., 0])
  assert_close(run(causal), run(None, mask=mask), 1e-6)


def test_is_causal_of_nnx():
  expected = run_nnx(None, is_causal=True)
  assert_close(run_nnx(DENSE, is_causal=True), expected, 1e-6)
  attention = linformer(rank=3)
  fn = as_attention_fn(attention, attention.init(jax.random.key(0), DIMS))
  with pytest.raises(ValueError, match=r"^is_causal: "):
    run_nnx(fn, is_causal=True)


@pytest.mark.parametrize("name", FUNCTIONS)
@both_modules
def test_a_mask_along_queries_raises_where_it_cannot_be_honoured(run, name):
  function, options = FUNCTIONS[name]
  mask = linen.make_attention_mask(KEY_MASK, KEY_MASK)
  fn = as_attention_fn(function, **options)
  with pytest.raises(
    ValueError, match=r"^mask: .*key_mask\[:, None, None, :\]"
  ):
    run(fn, mask=mask)


@pytest.mark.parametrize("lead", [*thorough(((),)), (2, 3)])
@both_modules
def test_leading_axes(run, lead):
  inputs = jax.random.normal(jax.random.key(3), (*lead, LENGTH, FEATURES))
  keep = jax.random.bernoulli(jax.random.key(4), 0.7, (*lead, 1, 1, LENGTH))
  keep = keep.at[..., 0].set(True)
  shape = (*lead, 1, LENGTH, LENGTH)
  causal = jnp.tri(LENGTH, dtype=bool).reshape((1,) * (len(lead) + 1) + (6, 6))
  # nnx's own does not broadcast the leading axes of a mask.
  for mask in (keep, causal, causal[(0,) * (len(lead) + 1)]):
    full = jnp.asarray(np.broadcast_to(mask, shape))
    expected = run(None, inputs, mask=full)
    assert_close(run(DENSE, inputs, mask=mask), expected, 1e-6)


@pytest.mark.parametrize(
  ("name", "shape"),
  [
    ("mask", (1, 2, 1, 3, 3)),
    ("mask", (3, 1, 3, 3)),
    ("bias", (3, 1, 3, 3)),
    ("key", (3, 3, 2, 4)),
    ("value", (1, 3, 2, 4)),
  ],
)
def test_leading_axes_that_differ_are_named(name, shape):
  query = jnp.ones((2, 3, 2, 4))
  call = {"key": query, "value": query, name: jnp.ones(shape)}
  with pytest.raises(
    ValueError, match=rf"^{name}: expected leading axes \(2,\)"
  ):
    DENSE(query, **call)


def test_bias():
  query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 5, 2, 4))
  bias = jax.random.normal(jax.random.key(1), (1, 2, 5, 5))
  expected = linen.dot_product_attention(query, key, value, bias=bias)
  assert_close(DENSE(query, key, value, bias=bias), expected, 1e-6)
  fixed = as_attention_fn(dense(), bias=bias)
  assert_close(fixed(query, key, value), expected, 1e-6)
  with pytest.raises(ValueError, match=r"^bias: expected one"):
    fixed(query, key, value, bias=bias)
  window = as_attention_fn(sliding_window(window=2))
  with pytest.raises(ValueError, match=r"^bias: "):
    window(query, key, value, bias=bias)


@both_modules
def test_dropout(run):
  settings = {"dropout_rate": 0.5, "broadcast_dropout": False}

  def call(fn, deterministic, seed=0, settings=settings):
    rngs = {"dropout": jax.random.key(seed)}
    rngs = rngs if run is run_linen else nnx.Rngs(**rngs)
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
  with pytest.raises(ValueError, match=r"^dropout_r.*dense"):
    call(sums, deterministic=False)


@both_modules
def test_dtype(run):
  out = run(DENSE, settings={"dtype": jnp.bfloat16})
  assert out.dtype == jnp.bfloat16
  assert_close(out, run(None, settings={"dtype": jnp.bfloat16}), 2e-2)
  seen = []

  def spy(query, key, value, **call):
    seen.extend(x.dtype for x in (query, key, value))
    return dense_attention(query, key, value, **call)

  fn = as_attention_fn(functools.wraps(dense_attention)(spy))
  fn(*[jnp.ones((1, 2, 1, 4))] * 3, dtype=jnp.bfloat16)
  assert set(seen) == {jnp.dtype(jnp.bfloat16)}


@both_modules
def test_precision_raises(run):
  with pytest.raises(ValueError, match=r"^precision: expected None"):
    run(DENSE, settings={"precision": "highest"})


def test_the_einsum_hooks_of_linen_raise():
  settings = {
    "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
    "attn_weights_value_einsum_cls": lambda: jnp.einsum,
  }
  with pytest.raises(ValueError, match=r"^qk_attn_weights_einsum: "):
    run_linen(DENSE, settings=settings)


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
def test_sowing_the_weights_in_linen(lead):
  inputs = jax.random.normal(jax.random.key(3), (*lead, LENGTH, FEATURES))
  mask = linen.make_causal_mask(inputs[..., 0])
  sown = {}
  for name, fn in (("own", None), ("ours", DENSE)):
    _, state = run_linen(
      fn, inputs, mask=mask, sow_weights=True, mutable=["intermediates"]
    )
    (sown[name],) = state["intermediates"]["attention_weights"]
  assert_close(sown["ours"], sown["own"], 1e-6)


@pytest.mark.parametrize("is_forced", [False, True])
def test_sown_weights_have_the_dtype_of_flax(is_forced):
  settings = {"dtype": jnp.bfloat16, "force_fp32_for_softmax": is_forced}
  sown = []
  for fn in (None, DENSE):
    _, state = run_linen(
      fn, settings=settings, sow_weights=True, mutable=["intermediates"]
    )
    sown += state["intermediates"]["attention_weights"]
  assert sown[0].dtype == sown[1].dtype
  assert_close(sown[1], sown[0], 1e-2)
  sums = np.asarray(sown[1], np.float64).sum(axis=-1)
  assert_close(sums, np.ones_like(sums), 1e-6 if is_forced else 1e-2)


def test_sowing_the_weights_in_nnx():
  sown = {}
  for name, fn in (("own", None), ("ours", DENSE)):
    settings = {} if fn is None else {"attention_fn": fn}
    module = nnx.MultiHeadAttention(
      HEADS, FEATURES, decode=False, rngs=nnx.Rngs(0), **settings
    )
    capture = nnx.capture(
      lambda module: module(INPUTS, sow_weights=True), nnx.Intermediate
    )
    _, state = capture(module)
    (sown[name],) = state["attention_weights"]
  assert_close(sown["ours"], sown["own"], 1e-6)


def test_sown_weights_are_those_of_the_mechanism():
  fn = as_attention_fn(sliding_window(window=1), is_causal=True)
  _, state = run_linen(fn, sow_weights=True, mutable=["intermediates"])
  (weights,) = state["intermediates"]["attention_weights"]
  band = np.tri(LENGTH) - np.tri(LENGTH, k=-2)
  np.testing.assert_array_equal(
    np.asarray(weights) > 0, band * np.ones((3, HEADS, 1, 1)) > 0
  )


def decode_linen(fn):
  """Six cached steps of linen's decoder."""
  module = linen.MultiHeadDotProductAttention(
    num_heads=HEADS, attention_fn=fn, decode=True
  )
  variables = module.init(jax.random.key(2), INPUTS)
  outs = []
  for t in range(LENGTH):
    out, cache = module.apply(
      variables, INPUTS[:, t : t + 1], mutable=["cache"]
    )
    variables = {**variables, **cache}
    outs.append(out)
  return jnp.concatenate(outs, axis=1)


@pytest.mark.parametrize("name", ["dense", "performer"])
def test_cached_decoding_in_linen(name):
  attention = ATTENTIONS[name]()
  variables = attention.init(jax.random.key(0), DIMS)
  expected = run_linen(as_attention_fn(attention, variables, is_causal=True))
  got = decode_linen(as_attention_fn(attention, variables))
  assert_close(got, expected, 1e-5)


def test_cached_decoding_in_nnx():
  module = nnx.MultiHeadAttention(
    HEADS, FEATURES, attention_fn=DENSE, decode=True, rngs=nnx.Rngs(0)
  )
  module.init_cache(INPUTS.shape)
  outs = [module(INPUTS[:, t : t + 1]) for t in range(LENGTH)]
  expected = run_nnx(None, is_causal=True)
  assert_close(jnp.concatenate(outs, axis=1), expected, 1e-5)


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
  for name in ("mask", "dropout_rate", "dropout_rng"):
    with pytest.raises(ValueError, match=f"^{name}: .*Flax module"):
      as_attention_fn(dense(), **{name: None})
  with pytest.raises(ValueError, match=r"^variables: expected None for"):
    as_attention_fn(dense_attention, {})


@both_modules
def test_an_unknown_option_raises(run):
  for attention in (dense(), dense_attention):
    with pytest.raises(ValueError, match=r"^widnow: "):
      run(as_attention_fn(attention, widnow=3))


def test_a_wrong_option_of_a_function_raises_at_once():
  with pytest.raises(ValueError, match=r"^window: dense .*; .*sliding_window"):
    as_attention_fn(dense_attention, window=3)


@both_modules
def test_a_partial_is_its_function(run):
  partial = functools.partial(performer_attention, projection=PROJECTION)
  expected = run(as_attention_fn(performer_attention, projection=PROJECTION))
  assert_close(run(as_attention_fn(partial)), expected, 1e-6)
  with pytest.raises(ValueError, match=r"^widnow: performer attention has no"):
    as_attention_fn(partial, widnow=3)
  with pytest.raises(ValueError, match=r"expected None for the function perf"):
    as_attention_fn(partial, {})


def test_a_bare_function_in_nnx_says_how_to_wrap_it():
  with pytest.raises(ValueError, match=r"as_attention_fn\(dense_attention\)"):
    run_nnx(dense_attention)


def unannotated(num_features=8):
  return performer(num_features)


@pytest.mark.parametrize("factory", [*ATTENTIONS.values(), unannotated])
def test_a_factory_is_no_attention(factory):
  name = factory.__name__
  with pytest.raises(ValueError, match=rf"got the factory {name}; .*{name}\("):
    as_attention_fn(factory)


def test_something_else_is_no_attention(unchecked):
  with pytest.raises(ValueError, match=r"^attention: expected .*, got str$"):
    as_attention_fn("dense")


@pytest.mark.parametrize("name", ATTENTIONS)
def test_variables_that_are_missing_are_named(name):
  attention = gates_from_keys(ATTENTIONS[name]())
  dims = DIMS._replace(max_length=2048, features=FEATURES)
  made = attention.init(jax.random.key(0), dims)
  if not made:
    as_attention_fn(attention)
    return
  ((collection, arrays),) = made.items()
  for array in arrays:
    with pytest.raises(ValueError, match=f"^variables: .*{collection}.{array}"):
      as_attention_fn(attention)
  as_attention_fn(attention, made)


def test_gates_need_inputs_that_flax_does_not_give():
  with pytest.raises(
    ValueError, match=r"^attention: its gates read .*gates_fr"
  ):
    as_attention_fn(ATTENTIONS["gated_delta"]())


def test_grouped_heads_in_nnx():
  settings = {"num_kv_heads": 1}
  assert_close(
    run_nnx(DENSE, settings=settings), run_nnx(None, settings=settings), 1e-6
  )


def test_sown_weights_leave_dropout_out():
  settings = {"dropout_rate": 0.5, "broadcast_dropout": False}
  _, state = run_linen(
    DENSE,
    settings=settings,
    deterministic=False,
    rngs={"dropout": jax.random.key(0)},
    sow_weights=True,
    mutable=["intermediates"],
  )
  (weights,) = state["intermediates"]["attention_weights"]
  assert_close(weights.sum(axis=-1), jnp.ones(weights.shape[:-1]), 1e-5)
