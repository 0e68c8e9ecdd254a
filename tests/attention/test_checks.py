"""The checks that every attention function shares."""

import functools
import importlib
import inspect
import math
import re

import chex
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import attention
from attention import ATTENTIONS, checks
from attention import mechanism as mechanisms
from attention import testing as attention_testing
from tests.attention.forms import FUNCTIONS, RECURRENT
from tests.refusals import assert_refused

QUERY, KEY, VALUE = (
  np.zeros(x, np.float32) for x in ((2, 5, 4, 8), (2, 3, 2, 8), (2, 3, 2, 6))
)


def check_segments(query_segment_ids, key_segment_ids):
  ids = {
    "query_segment_ids": query_segment_ids,
    "key_segment_ids": key_segment_ids,
  }
  checks.check_pairs(QUERY, KEY, VALUE, **ids)


def test_what_does_not_fit_raises(unchecked):
  for name, *qkv in (
    ("query", QUERY[0], KEY, VALUE),
    ("key", QUERY, KEY.astype(int), VALUE),
    ("key", QUERY, KEY[..., :7], VALUE),
    ("key", QUERY, KEY[:1], VALUE[:1]),
    ("value", QUERY, KEY, VALUE[:, :2]),
    ("value", QUERY, KEY, VALUE[:, :, :1]),
    ("query", QUERY[:, :, :3], KEY, VALUE),
  ):
    assert_refused(functools.partial(checks.check_qkv, *qkv), (name, {}))


def test_a_wrong_mask_raises(unchecked):
  for shape, message in (
    ((5, 3), r"rank 4.*; give mask\[None, None\] for \[T, S\]"),
    ((2, 3), r"give mask\[:, None, None, :\] for \[B, S\]"),
    ((2, 5, 3), r"give mask\[:, None\] for \[B, T, S\]"),
    ((4, 5, 3), r"give mask\[None\] for \[N, T, S\]"),
    ((7, 3), r"got shape \(7, 3\)$"),
    ((2, 2, 5, 3), r"broadcastable to .* \[2, 4, 5, 3\]"),
  ):
    with pytest.raises(ValueError, match=f"^mask: .*{message}"):
      checks.check_mask(np.ones(shape, bool), (2, 4, 5, 3))
  with pytest.raises(
    ValueError, match=r"^mask: .*expected bool .* got float32"
  ):
    checks.check_mask(np.ones((2, 4, 5, 3), np.float32), (2, 4, 5, 3))


def test_a_key_mask_is_read():
  read = jax.jit(lambda mask: checks.key_mask(mask, QUERY, KEY, ""))
  for shape in (1, 1, 1, 3), (2, 1, 1, 1), (2, 1, 1, 3):
    mask = np.arange(3)[-shape[3] :] * np.ones(shape) > 0
    got = np.asarray(read(mask))
    assert got.shape == (2, 3)
    assert (got == mask[:, 0, 0, :]).all()
  for shape in (2, 4, 1, 3), (2, 1, 5, 3):
    with pytest.raises(
      ValueError, match=r"key_mask\[:, None, None, :\].*; do X"
    ):
      checks.key_mask(np.ones(shape, bool), QUERY, KEY, "do X")


def test_segment_ids_come_in_pairs(unchecked):
  ids = jnp.zeros((2, 5), int)
  for name, *both in (
    ("key_segment_ids", ids, None),
    ("query_segment_ids", None, ids[:, :3]),
    ("key_segment_ids", ids, ids),
    ("query_segment_ids", ids * 1.0, ids[:, :3]),
  ):
    assert_refused(functools.partial(check_segments, *both), (name, {}))


def test_the_scale():
  assert checks.softmax_scale(None, 16) == 0.25
  assert checks.softmax_scale(0.5, 16) == 0.5
  for scale in (float("nan"), float("inf")):
    with pytest.raises(ValueError, match=r"^scale: expected a finite number"):
      checks.softmax_scale(scale, 16)
  # Where annotations are checked at run time, they say it first.
  either = ValueError, jaxtyping.TypeCheckError
  for scale in (jnp.ones(4), np.ones(1), [1.0]):
    with pytest.raises(
      either, match=r"^scale: expected one number, got sh|'sca"
    ):
      checks.softmax_scale(scale, 16)
  with pytest.raises(either, match="scale"):
    checks.softmax_scale(True, 16)


def test_options_are_taken_or_refused():
  def function(query, key, value, *, mask=None, is_causal=False):
    del query, key, value, mask, is_causal

  def accepted(**options):
    return mechanisms.accepted_options("toy", function, options)

  assert accepted(mask=None, is_causal=True) == {
    "mask": None,
    "is_causal": True,
  }
  for option in ("bias", "dropout_rate", "nosuch"):
    # With any value: nothing given is ignored.
    for asked in (None, False, 0.0, 3, QUERY):
      with pytest.raises(
        ValueError, match=rf"^{option}: toy has no such option; it has .*mask, "
      ):
        accepted(**{option: asked})
  with pytest.raises(ValueError, match=r"^mask: toy sets it itself"):
    mechanisms.accepted_options("toy", function, {"mask": None}, own=["mask"])
  assert mechanisms.accepted_options("toy", lambda **any: None, {"x": 3})


X = jnp.ones((1, 4, 2, 8))
GATED = attention.gated_linear_attention


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_bare_function_refuses_what_it_does_not_take(name):
  function = FUNCTIONS[name]
  with pytest.raises(ValueError, match=r"; did you mean 'is_causal'\?$"):
    function(X, X, causal=True)
  parameters = inspect.signature(function).parameters
  assert function.__doc__
  with pytest.raises(ValueError, match="by position and options by name, got"):
    function(X, X, X, X)
  arrays = {n for n, p in parameters.items() if "Array" in str(p.annotation)}
  needed = {n: X for n, p in parameters.items() if p.default is p.empty}
  numbers = {"scale", "weight"}
  for option in sorted(arrays - numbers - {"global_qkv", "feature_map"}):
    for wrong in ([[True]], True, 3.0):
      with pytest.raises(ValueError, match=f"^{option}: expected an array, go"):
        function(**{**needed, option: wrong})
  option = "value" if "value" in needed else "latent"
  with pytest.raises(
    ValueError, match=f"^{option}: expected an array, got None"
  ):
    function(**{**needed, option: None})


@pytest.mark.parametrize(
  ("name", "call", "message"),
  [
    ("dense", {"window": 3}, "window: dense_attention has no such option; it has"),
    ("linear", {"bias": X}, "bias: linear_attention has no such option; it has"),
    # As other libraries have them, or by a word of their name.
    ("dense", {"dropout": 0.1}, "dropout: .*; did you mean 'dropout_rate'\\?$"),
    ("dense", {"soft_cap": 3.0}, ".*; did you mean 'logits_soft_cap'\\?$"),
    ("sliding_window", {"window_size": 3}, ".*; did you mean 'window'\\?$"),
    ("performer", {}, "projection: performer_attention needs it, got nothing$"),
    ("sliding_window", {}, "window: .* needs it, got nothing"),
    ("dense", {"dropout_rng": 0}, r"dropout_rng: .* jax.random.key\(0\) makes"),
  ],
)  # fmt: skip
def test_a_bare_function_says_what_is_wrong(name, call, message):
  with pytest.raises(ValueError, match=f"^{message}"):
    FUNCTIONS[name](X, X, X, **call)


def test_a_checked_function_is_the_function_to_jax_and_to_tools():
  function = attention.dense_attention
  assert function.__name__ == "dense_attention"
  assert list(inspect.signature(function).parameters)[:4] == [
    "query",
    "key",
    "value",
    "mask",
  ]
  jitted = jax.jit(function, static_argnames=("is_causal",))
  out = jitted(X, key=X, value=np.asarray(X), is_causal=True)
  assert out.shape == X.shape
  assert jax.eval_shape(function, X, X, X).shape == X.shape


def test_lists_in_place_of_arrays_are_refused_by_records(unchecked):
  for name in ("dense", "bigbird"):
    apply = functools.partial(ATTENTIONS[name]().apply, {})
    assert_refused(lambda x, f=apply: f(x, X, X), ("query", {"x": [1.0]}))


def test_an_axis_without_anything_is_refused():
  decay = jnp.zeros((1, 4, 2))
  recurrence = functools.partial(
    attention.gated_linear_attention, log_decay=decay
  )
  index = {"index_query": X[:, :, :0], "index_key": X[:, :, 0]}
  index |= {"index_weight": decay[:, :, :0], "top_k": 2}
  selecting = functools.partial(attention.dsa_attention, **index)
  for function, name, *qkv in (
    (attention.dense_attention, "query", *[X[:0]] * 3),
    (attention.dense_attention, "query", X[:, :0], X, X),
    (attention.dense_attention, "query", X[:, :, :0], X, X),
    (attention.dense_attention, "query", *[X[..., :0]] * 3),
    (attention.dense_attention, "key", X, *[X[:, :0]] * 2),
    (attention.dense_attention, "key", X, *[X[:, :, :0]] * 2),
    (attention.dense_attention, "value", X, X, X[..., :0]),
    (recurrence, "query", X[:, :, :0], X, X),
    (recurrence, "value", X, X, X[:, :, :0]),
    (selecting, "index_query", X, X, X),
  ):
    with pytest.raises(
      ValueError, match=rf"^{name}: expected sizes of at least one"
    ):
      function(*qkv)
  blocks = jnp.zeros((1, 4, 1, 0), int)
  with pytest.raises(ValueError, match=r"^block_indices: .* M of at least 1"):
    attention.selected_attention(X, X, X, block_indices=blocks, block_size=4)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"query": X[0]}, r"query: .* as_attention_fn\(function\) takes arr.* batch$"),
    ({"query_segment_ids": jnp.zeros((1, 4, 2), int)},
     r"query_segment_ids: expected 2 axes \[B, T\], got shape \(1, 4, 2\)$"),
    ({"query_segment_ids": jnp.zeros((1, 3), int)},
     r"query_segment_ids: expected \[1, 4\] for \[B, T\], got shape \(1, 3\)$"),
    ({"sinks": jnp.zeros((4, 2))}, r"sinks: expected \[2\] for"),
    ({"relative_bias": jnp.zeros((3, 7))}, "relative_bias: expected"),
    ({"relative_bias": jnp.zeros((2, 6))}, "relative_bias: expected"),
    ({"relative_bias": jnp.zeros((1, 2, 7))}, "relative_bias: expected"),
    ({"relative_keys": jnp.zeros((7, 7))}, "relative_keys: expected"),
    ({"relative_keys": jnp.zeros((2, 7, 7))}, "relative_keys: expected"),
    *(
      ({"log_forget": jnp.zeros((1, 4, 2)), "is_causal": True,
        "key": jnp.ones((1, length, 2, 8)), "value": jnp.ones((1, length, 2, 8))},
       "log_forget: expected query and key of one length")
      for length in (3, 5)
    ),
    *(({"logits_soft_cap": x}, "logits_soft_cap: expected a finite number above 0")
      for x in (math.inf, math.nan, True, -1)),
    ({"mask": jnp.ones((1, 2, 1, 5), bool)}, "mask: expected rank 4"),
  ],
)  # fmt: skip
def test_shapes_and_numbers_that_do_not_fit_are_told(
  change, message, unchecked
):
  with pytest.raises(ValueError, match=f"^{message}"):
    attention.dense_attention(**{"query": X, "key": X, "value": X} | change)


def test_hints_are_given_where_they_help(unchecked):
  for shape, hint in (
    ((1, 1, 4, 4), r"\(1, 1, 4, 4\); a causal mask is is_causal=True; "),
    ((1, 2, 1, 4), r"\(1, 2, 1, 4\); "),
  ):
    with pytest.raises(ValueError, match=f"got shape {hint}[a-z]+ [a-z]+ "):
      attention.linear_attention(X, X, X, mask=jnp.ones(shape, bool))
  decay = jnp.zeros((1, 4, 2))
  with pytest.raises(ValueError, match=r"^key: .*cross-attention use dense$"):
    attention.gated_linear_attention(X, X[:, :3], X[:, :3], log_decay=decay)
  for lists in ([[1.0]], (1.0,)):
    with pytest.raises(ValueError, match=r"; jnp.asarray\(query\) makes one$"):
      attention.dense_attention(lists, X, X)
  with pytest.raises(
    ValueError, match=r"^implementation: expected None or one"
  ):
    attention.flash_attention(X, X, X, implementation="x")
  with pytest.raises(
    ValueError, match=r"^kernel: expected one of softmax, rel"
  ):
    ATTENTIONS["performer"](kernel="x")


def test_numbers_of_any_kind_are_numbers():
  expected = attention.dense_attention(X, X, X, scale=2.0, logits_soft_cap=3.0)
  for kind in (int, np.float32, np.int64, np.array, jnp.float32):
    found = attention.dense_attention(X, X, X, scale=kind(2), logits_soft_cap=3)
    np.testing.assert_array_equal(found, expected)
  one_row = attention.dense_attention(
    X, X, X, block_size=np.int64(1), is_causal=np.bool_(True)
  )
  causal = attention.dense_attention(X, X, X, is_causal=True)
  np.testing.assert_allclose(one_row, causal, rtol=1e-6)
  weight = np.float64(0.5)
  assert (
    attention.differential_attention(X, X, X, weight=weight).shape == X.shape
  )


def test_results_have_the_dtype_of_the_query():
  half = X.astype(jnp.bfloat16)
  out, lse = attention.dense_attention(half, X, X, return_lse=True)
  assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
  assert attention.dense_attention(half, X, X).dtype == jnp.bfloat16
  assert attention.dense_attention(X, half, half).dtype == jnp.float32


def test_an_axis_of_a_fixed_size_has_it():
  """Two gates of the three branches would be read beyond their end."""
  weights = {"key_weights": jnp.ones((2, 2)), "value_weights": jnp.ones((2, 2))}
  for size in (2, 4):
    with pytest.raises(
      ValueError, match=r"^branch_gates: expected \[1, 4, 2, 3\] for"
    ):
      attention.nsa_attention(
        *(X, X, X),
        branch_gates=jnp.ones((1, 4, 2, size)),
        **weights,
        **{"stride": 1, "block_size": 2, "num_blocks": 3, "window": 2},
      )


def test_the_record_of_a_recurrence_takes_no_option_of_its_own_code():
  record = ATTENTIONS["retention"]()
  dims = attention.Dims(2, 2, 8, 4, 16)
  state = record.init_cache({}, 1, 4, dims, jnp.float32)
  for option in ("state", "gates", "params"):
    with pytest.raises(ValueError, match=f"^{option}: retention has n"):
      record.apply({}, X, X, X, **{option: state}, is_causal=True)


@pytest.mark.parametrize("name", ["dense", "linear", "retention", "latent"])
def test_decode_and_prefill_refuse_what_they_would_misread(name, unchecked):
  """Options of a whole sequence, other numbers of positions, and wrong lengths."""
  record, dims = ATTENTIONS[name](), attention.Dims(2, 2, 8, 4, 16)
  variables = record.init(jax.random.key(0), dims)
  gates = (
    {} if name != "latent" else record.gates(variables, jnp.ones((1, 4, 16)))
  )
  key = None if name == "latent" else X
  cache = record.init_cache(variables, 1, 4, dims, jnp.float32)
  row, first = X[:, :1], {n: x[:, :1] for n, x in gates.items()}
  options = (
    {"is_causal": True},
    {"mask": jnp.ones((1, 1, 1, 4), bool)},
    {"visible": attention.causal()},
    {"bias": jnp.zeros((1, 1, 1, 4))},
    *({"return_lse": True}, {"axis_name": "x"}, {"dropout_rate": 0.1}),
    *({"dropout_rng": None}, {"global_qkv": None}),
    {"global_indices": jnp.zeros((1, 1), int)},
    {"key_segment_ids": jnp.zeros((1, 4), int)},
    {"widnow": 3},
  )
  keys = (None,) * 2 if key is None else (row, row)
  decode = functools.partial(record.decode, variables, cache, **first)
  assert_refused(functools.partial(decode, row, *keys), *options)
  for wrong in (X[:, :2], row[:, :, 0]):
    assert_refused(functools.partial(decode, wrong, *keys), ("query", {}))
  if key is not None:
    assert_refused(functools.partial(decode, row, X, row), ("key", {}))
  prefill = functools.partial(record.prefill, variables, cache, X, key, key)
  prefill = functools.partial(prefill, **gates)
  three = jnp.array([3])
  assert_refused(functools.partial(prefill, three), *options)
  if name == "dense":  # Its cache has a size, and it takes tables.
    shapes = (3, 7), (2, 6), (1, 2, 7)
    tables = ({"relative_bias": jnp.zeros(shape)} for shape in shapes)
    assert_refused(functools.partial(decode, row, *keys), *tables)
    long = jnp.ones((1, 5, 2, 8))
    full = functools.partial(record.prefill, variables, cache, *[long] * 3)
    assert_refused(full, ("cache", {"lengths": three}))
  for lengths in ([3], 3, three[None], three * 1.0, three - 4, three + 2):
    assert_refused(functools.partial(prefill, lengths), ("lengths", {}))


@pytest.mark.parametrize(
  "name",
  ["dense", "linear", "sliding_window", "additive", "differential"],
)
def test_decode_and_prefill_refuse_rows_that_the_cache_does_not_have(
  name, unchecked
):
  """jnp would broadcast one example, one head and one channel."""
  record, dims = ATTENTIONS[name](), attention.Dims(2, 2, 8, 400)
  variables = record.init(jax.random.key(0), dims)
  cache, one_row = (
    record.init_cache(variables, batch, 4, dims, jnp.float32)
    for batch in (2, 1)
  )
  x = jnp.concatenate([X, X])
  lengths = jnp.array([4, 3])
  for run, length, more in (
    (record.decode, 1, ()),
    (record.prefill, 4, (lengths,)),
  ):
    y = x[:, :length]
    for key, arrays, own in (
      ("query", (y, y, y), one_row),
      ("value|key", (y, y[:, :, :1], y[:, :, :1]), cache),
      ("value", (y, y, y[..., :1]), cache),
      ("key", (y, y[:1], y), cache),
    ):
      call = functools.partial(run, variables, own, *arrays, *more)
      with pytest.raises(ValueError, match=f"^({key}): expected"):
        call()


@pytest.mark.parametrize("name", ["dense", "sliding_window", "latent"])
def test_prefill_refuses_a_cache_that_it_would_overwrite(name):
  record, dims = ATTENTIONS[name](), attention.Dims(2, 2, 8, 400, 16)
  variables = record.init(jax.random.key(0), dims)
  call = () if name == "latent" else (X, X)
  gates = record.gates(variables, jnp.ones((1, 4, 16))) if not call else {}
  prefill = functools.partial(record.prefill, variables, **gates)
  call = X, *(call or (None, None)), np.array([2], np.uint8)
  cache = prefill(record.init_cache(variables, 1, 4, dims, jnp.float32), *call)
  assert cache.index.dtype == jnp.int32  # 8 bits would count to 255.
  with pytest.raises(ValueError, match=r"^cache: .*empty cache.* 2 positions"):
    prefill(cache, *call)


@pytest.mark.parametrize("name", ["dense", "linear", "sliding_window"])
def test_a_cache_and_lengths_may_be_constants_of_a_program(name):
  record, dims = ATTENTIONS[name](), attention.Dims(2, 2, 8, 400)
  variables = record.init(jax.random.key(0), dims)
  cache = record.init_cache(variables, 1, 4, dims, jnp.float32)
  lengths, row = jnp.array([3]), X[:, :1]

  def run(x):
    filled = record.prefill(variables, cache, x, x, x, lengths)
    first, _ = record.decode(variables, cache, row, row, row)
    return first, record.decode(variables, filled, row, row, row)[0]

  chex.assert_trees_all_close(jax.jit(run)(X), run(X), atol=1e-6)


PARAMETERS = {
  name: inspect.signature(getattr(attention, name)).parameters
  for name in attention.__all__
  if name.endswith(("_attention", "_loss"))
}
ALL_FUNCTIONS = {name: getattr(attention, name) for name in PARAMETERS}
ALL_OPTIONS = {
  option: None
  for parameters in PARAMETERS.values()
  for option, p in parameters.items()
  if p.kind is p.KEYWORD_ONLY
}


def arguments_of(name, **options):
  """What a function cannot do without, of any shape, and options."""
  parameters = PARAMETERS[name].items()
  return {n: X for n, p in parameters if p.default is p.empty} | options


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_an_option_of_another_function_is_refused(name):
  for option in (*ALL_OPTIONS, "rank", "num_features", "max_rate"):
    if option in PARAMETERS[name]:
      continue
    told = f"^{option}: {name} has no such option; it has "
    with pytest.raises(ValueError, match=told):
      ALL_FUNCTIONS[name](**arguments_of(name, **{option: X}))


@pytest.mark.parametrize("name", ALL_FUNCTIONS)
def test_a_traced_option_says_static_argnames(name):
  """Of all options without an array: flags, counts, rates, words, and pairs."""
  tried = 0
  for option, p in PARAMETERS[name].items():
    words = set(re.findall(r"\w+", str(p.annotation)))
    if not words & {"bool", "int", "float", "Literal"} or "Float" in words:
      continue
    for traced in (1, True, 0.5, (1, 2)):

      def run(x, option=option):
        return ALL_FUNCTIONS[name](**arguments_of(name, **{option: x}))

      told = f"^{option}: expected a Python value, .*static_argnames='{option}'"
      with pytest.raises(ValueError, match=told):
        jax.jit(run)(traced)
      tried += 1
  assert tried >= 8


@pytest.mark.parametrize("name", ATTENTIONS)
def test_a_factory_or_record_that_is_given_arrays_says_apply(name):
  factory = ATTENTIONS[name]
  calls = [({"args": (X,) * 3}, {}), ({}, dict.fromkeys(("query", "key"), X))]
  for args, options in calls:
    if not inspect.signature(factory).parameters and args:
      continue
    with pytest.raises(
      ValueError, match=rf"got an array; call .*{name}\(…\)\.a"
    ):
      factory(*args.get("args", ()), **options)
  record = mechanisms.example(factory)
  for args, options in (((X, X, X), {}), ((), {"query": X, "is_causal": True})):
    with pytest.raises(
      TypeError, match=r"call mechanism\.apply\(variables, que"
    ):
      record(*args, **options)


def test_attention_weights_of_an_affine_function_and_of_more_value_heads(
  unchecked,
):
  """A part of the result from a state is no weight of a value."""
  rng = np.random.default_rng(0)
  query, key = rng.standard_normal((2, 2, 4, 2, 4), np.float32)
  value, state = (
    rng.standard_normal(shape, np.float32)
    for shape in ((2, 4, 4, 4), (2, 4, 4, 4))
  )
  call = {"log_decay": -np.abs(value[..., 0])}
  run = functools.partial(attention.attention_weights, GATED, query, key)
  expected = np.einsum(
    "btnh,bsnh->bnts", np.repeat(query, 2, 2), np.repeat(key, 2, 2)
  )
  total = np.cumsum(call["log_decay"], axis=1).swapaxes(1, 2)
  expected *= 0.5 * np.tril(np.exp(total[..., None] - total[..., None, :]))
  for more in ({}, {"initial_state": state}):
    weights = run(value, **call, **more)
    np.testing.assert_allclose(weights, expected, atol=1e-5)
  with pytest.raises(ValueError, match=r"^value: .*initial_state"):
    run(**call, initial_state=state)
  with pytest.raises(ValueError, match=r"^log_decay: ") as error:
    run(**call)
  assert "2 heads" in error.value.__notes__[-1]
  with pytest.raises(ValueError, match=r"^fn: expected one array.* tuple"):
    run(value, **call, return_state=True)
  with pytest.raises(ValueError, match=r"^key: expected 4 axes"):
    attention.attention_weights(GATED, query, key[0], **call)


@pytest.mark.parametrize("name", ["mlstm", "log_linear"])
def test_a_state_of_another_type_is_refused(name):
  gates = {
    "mlstm": {"log_input": X[..., 0]},
    "log_linear": {"level_scales": X},
  }[name]
  function = getattr(attention, f"{name}_attention")
  call = {"log_decay": -X[..., 0], "initial_state": jnp.zeros((1, 2, 8, 8))}
  with pytest.raises(
    ValueError, match=r"^initial_state: expected an? .*State.*, got array"
  ):
    function(X, X, X, **call, **gates)


def test_a_state_in_bfloat16_is_that_of_its_numbers():
  gates = {"beta": 0.5 * X[..., 0], "log_decay": -0.1 * X[..., 0]}
  gates |= {"square_rate": gates["beta"], "square_decay": gates["log_decay"]}
  run = functools.partial(
    attention.precond_delta_attention, X, X, X, center=jnp.ones(2), **gates
  )
  _, state = run(return_state=True)
  half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)
  same = jax.tree.map(lambda x: x.astype(jnp.float32), half)
  chex.assert_trees_all_close(
    run(initial_state=half), run(initial_state=same), atol=1e-6
  )


def test_a_record_is_no_attention_function(unchecked):
  for wrong in (ATTENTIONS["dense"](), "dense"):
    with pytest.raises(ValueError, match=r"^fn: expected an attention functio"):
      attention.attention_weights(wrong, X, X)
  for wrong in (ATTENTIONS["dense"](), attention.dense_attention):
    with pytest.raises(ValueError, match=r"^factory: expected a function"):
      attention_testing.check_mechanism(wrong, None)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_options_of_a_function_are_capabilities_of_its_record(name):
  options = {*inspect.signature(FUNCTIONS[name]).parameters}
  capabilities = mechanisms.CALL_OPTIONS
  supports = mechanisms.example(ATTENTIONS[name]).supports
  # A table of the grid, and sinks that are trained, are the record's own.
  own = {"window_2d": {"relative"}, "compressed": {"sinks"}}.get(name, set())
  for option, capability in capabilities.items():
    is_option = option in options and capability not in own
    assert is_option == (capability in supports), option


RECURRENCES = [n for n, p in PARAMETERS.items() if "segment_ids" in p]


def test_segments_of_recurrences_have_one_name_for_functions_and_one_for_records():
  assert len(RECURRENCES) == 16
  ids = jnp.zeros((1, 4), int)
  for name in RECURRENCES:
    for option in ("query_segment_ids", "key_segment_ids"):
      with pytest.raises(ValueError, match=rf"^{option}: .*, segment_ids"):
        ALL_FUNCTIONS[name](**arguments_of(name, **{option: ids}))
  for name in RECURRENT:
    record = mechanisms.example(ATTENTIONS[name])
    is_alone = {"own_keys", "shared_qk"} <= record.supports
    arrays = (X, None, None) if is_alone else (X, X, X)
    with pytest.raises(
      ValueError, match=r"^segment_ids: .*, query_segment_ids"
    ):
      record.apply({}, *arrays, segment_ids=ids, is_causal=True)


@pytest.mark.parametrize(
  ("name", "meant"),
  [("Performer", "performer"), ("DENSE", "dense"), ("dleta", "delta"),
   ("sliding-window", "sliding_window"), ("mamba_2", "mamba2")],
)  # fmt: skip
def test_a_mechanism_that_was_meant(name, meant):
  told = f"^unknown '{name}'; did you mean '{meant}'\\?$"
  with pytest.raises(ValueError, match=told):
    mechanisms.find(name)


def test_a_mechanism_that_is_like_none_gets_all_names():
  with pytest.raises(ValueError, match=r"^expected one of dense, .* 'xyz'$"):
    mechanisms.find("xyz")


@pytest.mark.parametrize(
  ("name", "hint"),
  [
    ("Performer", "; did you mean 'performer'?"),
    ("Flash_Attention", "; did you mean 'flash_attention'?"),
    ("xyz", ""),
  ],
)
def test_a_name_of_the_library_that_was_meant(name, hint):
  with pytest.raises(AttributeError, match=f"{name!r}{re.escape(hint)}$"):
    getattr(attention, name)


def test_former_modules_have_what_their_successors_have():
  for old, new, name in (
    ("plug", "mechanism", "accepted_options"),
    ("arguments", "checks", "check_pairs"),
    ("modules", "flax", "LinenAttention"),
  ):
    old = importlib.import_module(f"attention.{old}")
    new = importlib.import_module(f"attention.{new}")
    with pytest.warns(DeprecationWarning, match=f"{new.__name__}.{name} now$"):
      assert getattr(old, name) is getattr(new, name)
    with pytest.raises(AttributeError, match="nosuch"):
      old.nosuch  # noqa: B018


def test_the_former_name_of_apply_on_shards():
  mechanism = attention.dense()
  with pytest.warns(DeprecationWarning, match="apply now, which takes axis_na"):
    assert mechanism.apply_sharded is mechanism.apply
