"""The functions of the recurrence are their definitions."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  Dims,
  definitions,
  delta_product_attention,
  delta_rule_attention,
  gated_linear_attention,
  kimi_delta,
  lightning,
  rwkv6_attention,
  rwkv7_attention,
)
from attention.definitions import recurrent
from attention.platform import backend
from attention.recurrent.scan import chunk_prefixes
from attention.recurrent.triangular import inverse, pair_decays, pairs
from attention.testing import assert_close
from tests.attention import calls
from tests.attention.forms import SIZES
from tests.attention.state_cases import (
  BATCH,
  DIM,
  HEADS,
  KV_HEADS,
  VALUE,
  assert_bfloat16,
  assert_finite,
  assert_goes_on,
  assert_gradients,
  assert_strong_decays,
  assert_values,
  call,
  compiled,
  options,
)

RULES = [
  ("gated", "head"),
  ("gated", "channel"),
  ("delta", "head"),
  ("delta", "channel"),
  ("delta", "none"),
  ("gates", "channel"),
  ("product", "head"),
  ("rwkv7", "channel"),
  ("comba", "head"),
  ("rwkv6", "channel"),
]
FUNCTIONS = {
  "gated": gated_linear_attention,
  "delta": delta_rule_attention,
  "gates": delta_rule_attention,
  "product": delta_product_attention,
  "rwkv7": rwkv7_attention,
  "comba": delta_rule_attention,
  "rwkv6": rwkv6_attention,
}
"""With `comba`, the delta rule has keys of what is erased; with `gates`, gates too."""

WRITES = 3
SHORTER = [
  *((*rule, 1) for rule in (RULES[3], *RULES[6:8])),
  *((*rule, 7) for rule in (RULES[1], RULES[5], RULES[9])),
  *((*rule, 64) for rule in (RULES[2], RULES[7])),
  *((*rule, 65) for rule in (RULES[0], RULES[4], RULES[8])),
]
"""Of each length some rules, and of each rule a length below that of gradients."""


def arrays(length, form, seed=0):
  """All arrays of a call by name; decays of 1, e⁻³⁰ and e⁻⁶⁰ among them."""
  rng = np.random.default_rng(seed)
  key = rng.normal(size=(BATCH, length, KV_HEADS, DIM))
  found = {
    "query": rng.normal(size=(BATCH, length, HEADS, DIM)),
    "key": key / np.linalg.norm(key, axis=-1, keepdims=True),
    "value": rng.normal(size=(BATCH, length, KV_HEADS, VALUE)),
    "beta": rng.uniform(size=(BATCH, length, HEADS)),
    "initial_state": rng.normal(size=(BATCH, HEADS, DIM, VALUE)),
  }
  channels = (DIM,) if form == "channel" else ()
  decay = -rng.exponential(0.2, size=(BATCH, length, HEADS, *channels))
  if length > 40:
    decay[:, 10:13] = 0.0
    decay[:, 30], decay[:, 33] = -60.0, -30.0
    found["beta"][:, 20], found["beta"][:, 21] = 0.0, 1.0
    found["key"][:, 34:38] = found["key"][:, 34:35]  # Keys that repeat.
  if form != "none":
    found["log_decay"] = decay
  return {name: np.asarray(x, np.float32) for name, x in found.items()}


def chosen(rule, length, form):
  """The function, its definition, and the arrays that both take."""
  given, rng = arrays(length, form), np.random.default_rng(7)
  function = FUNCTIONS[rule]
  if rule in ("gated", "rwkv6", "rwkv7"):
    rate = given.pop("beta")[..., None]
  if rule in ("gates", "comba"):
    erased = given["key"] + 0.3 * rng.normal(size=given["key"].shape)
    given["erase_key"] = erased / np.linalg.norm(erased, axis=-1, keepdims=True)
  if rule == "gates":
    given["erase_gate"] = rng.uniform(size=(BATCH, length, HEADS, DIM))
    given["write_gate"] = rng.uniform(size=(BATCH, length, HEADS, VALUE))
  if rule == "product":
    for name in ("key", "value", "beta"):
      parts = [np.roll(given[name], r, axis=-1) for r in range(WRITES)]
      given[name] = np.stack(parts, axis=2)
  if rule == "rwkv6":
    given["bonus"] = rng.normal(size=(HEADS, DIM))
  if rule == "rwkv7":
    moved = rng.normal(size=(BATCH, length, HEADS, DIM))
    moved /= np.linalg.norm(moved, axis=-1, keepdims=True)
    given |= {"removal": -moved, "replacement": rate * moved}
  given = {name: np.asarray(x, np.float32) for name, x in given.items()}
  return function, getattr(definitions, function.__name__), given


@pytest.mark.parametrize(("rule", "form", "length"), SHORTER)
def test_values_and_states(rule, form, length):
  """Of a call, and of one that goes on from it."""
  assert_goes_on(*chosen(rule, 2 * length, form))


@pytest.mark.parametrize(
  ("rule", "form"), [*RULES[2:5], ("product", "head"), ("comba", "head")]
)
def test_normalized_keys(rule, form):
  """x / √(Σ x² + 10⁻⁶) by hand, as in fla's `use_qk_l2norm_in_kernel`.

  Among them are keys that 10⁻⁶ shortens, zeros, and keys that a mask hides.
  """
  function, definition, given = chosen(rule, 70, form)
  given["key"] *= np.linspace(0.5, 9.0, 70, dtype=np.float32).reshape(
    70, *[1] * (given["key"].ndim - 2)
  )
  given["key"][:, 5] *= 1e-4
  given["key"][:, 6] = 0.0
  unit = dict(given)
  for name in ("query", "key"):
    x = np.asarray(given[name], np.float64)
    unit[name] = x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)
  mask = np.ones((BATCH, 1, 1, 70), bool)
  mask[:, :, :, 9:12] = False
  expected = call(definition, unit, mask=mask)
  given["key"][:, 9] = np.nan
  run = compiled(function, normalize_keys=True)
  for got, wanted in zip(run(given, mask=mask), expected, strict=True):
    assert_close(got, wanted, 1e-5)

  def total(key):
    out, state = call(
      function, given | {"key": key}, normalize_keys=True, mask=mask
    )
    return jnp.sum(out**2) + jnp.sum(state**2)

  grad = jax.jit(jax.grad(total))(given["key"])
  assert np.isfinite(grad).all()
  # A key's length changes nothing but beside 10⁻⁶, so the gradient is across it.
  along = np.sum(np.nan_to_num(given["key"] * grad), axis=-1)
  np.testing.assert_allclose(along[:, 20:], 0.0, atol=1e-4)


@pytest.mark.parametrize("width", [16, 64])
def test_keys_of_a_softmax_model_do_not_explode(width):
  """|S_t|² grows by |v_t|² at most with keys of length 1 and rates up to 1."""
  rng = np.random.default_rng(0)
  query, key, value = rng.normal(size=(3, 2, 64, 4, width)).astype(np.float32)
  beta = rng.uniform(size=(2, 64, 4)).astype(np.float32)
  attend = jax.jit(functools.partial(delta_rule_attention, return_state=True))
  raw, _ = attend(query, key, value, beta=beta)
  assert not np.max(np.abs(raw)) < 1e9
  _, state = jax.jit(
    functools.partial(
      delta_rule_attention, return_state=True, normalize_keys=True
    )
  )(query, key, value, beta=beta)
  bound = np.sum(value**2, axis=(1, 3))
  assert (np.sum(np.square(state), axis=(2, 3)) <= bound).all()


def naive(given, mask, segment_ids):
  """The recurrence by `jax.lax.scan`, to be differentiated in float64."""
  query = given["query"]
  length = query.shape[1]
  along = {
    name: jnp.repeat(x, HEADS // KV_HEADS, axis=x.ndim - 2)
    if name in ("key", "value", "erase_key")
    else x
    for name, x in given.items()
    if name not in ("initial_state", "bonus")
  }
  decay = along.get("log_decay", jnp.zeros((BATCH, length, HEADS, 1)))
  along["log_decay"] = decay[..., None] if decay.ndim == 3 else decay
  begins = np.zeros((BATCH, length), bool)
  begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]

  def read(state, x):
    return jnp.einsum("bnh,bnhv->bnv", x, state)

  def step(state, now):
    k, v, beta = now["key"], now["value"], now.get("beta")
    first = now["first"][:, None, None, None]
    state = jnp.where(first, 0.0, state)
    after = jnp.exp(now["log_decay"])[..., None] * state
    if "removal" in now:
      moved = read(state, now["removal"])
      after += now["replacement"][..., None] * moved[:, :, None]
    for r in range(k.shape[1]) if k.ndim == 4 else [...]:
      key, error = (k[:, r], v[:, r]) if k.ndim == 4 else (k, v)
      if beta is not None:
        erased = now.get("erase_key", key) * now.get("erase_gate", 1.0)
        seen = state if "erase_key" in now else after
        error = error * now.get("write_gate", 1.0) - read(seen, erased)
        rate = beta[:, r] if k.ndim == 4 else beta
        error *= rate[..., None]
      after += key[..., None] * error[:, :, None]
    seen = now["seen"][:, None, None, None]
    before, state = state, jnp.where(seen, after, state)
    if "bonus" not in given:
      return state, DIM**-0.5 * read(state, now["query"])
    own = (given["bonus"][None] * k)[..., None] * v[:, :, None]
    before += jnp.where(seen, own, 0.0)
    return state, DIM**-0.5 * read(before, now["query"])

  along |= {"seen": jnp.asarray(mask[:, 0, 0]), "first": jnp.asarray(begins)}
  along = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), along)
  state, out = jax.lax.scan(step, given["initial_state"], along)
  return jnp.moveaxis(out, 0, 1), state


@pytest.mark.parametrize(("rule", "form"), RULES)
def test_all_gradients(rule, form):
  """Of query, key, value, decay, β, gates and the first state."""
  function, definition, given = chosen(rule, 150, form)
  both = function, definition
  assert_gradients(*both, naive, given, tolerance=1e-5, by_largest=False)


@pytest.mark.parametrize(
  ("rule", "form"), [x for x in RULES if "none" not in x and "product" not in x]
)
def test_gradients_of_strong_decays(rule, form):
  """Of the product rule, a decay of 1 lies between two writes at one position."""
  function, definition, given = chosen(rule, 150, form)
  assert_strong_decays(function, definition, naive, given)


@pytest.mark.parametrize(("rule", "form"), RULES)
def test_chunks_give_what_positions_do(rule, form):
  """A CPU takes a call that is not differentiated position by position."""
  function, _, given = chosen(rule, 150, form)
  given |= options(150)
  run = compiled(function)
  floats = {name: given.pop(name) for name in list(given) if name != "mask"}
  ids = floats.pop("segment_ids")
  call = jax.jit(lambda x: run(x | given | {"segment_ids": ids}))
  in_chunks = jax.jit(lambda x: jax.vjp(call, x)[0])
  assert_values(in_chunks(floats), call(floats), 2e-6)
  positions = 64 * -(-150 * (WRITES if rule == "product" else 1) // 64)
  loops = [str(jax.make_jaxpr(f)(floats)) for f in (call, in_chunks)]
  assert [f"length={positions}" in x for x in loops] == [True, False]


@pytest.mark.parametrize(("rule", "form"), [x for x in RULES if x[1] != "none"])
def test_extreme_decays_stay_finite(rule, form):
  """Everything is forgotten at once, again and again; nothing ever is."""
  function, definition, given = chosen(rule, 150, form)
  for low in (-1e4, -90.0, 0.0):
    given["log_decay"][:] = low
    assert_finite(function, definition, given)


def test_bfloat16_is_computed_in_float32():
  assert_bfloat16(*chosen("delta", 70, "head"))


def test_known_special_cases():
  """No decay is linear attention without a normaliser; β of 0 changes nothing."""
  given = arrays(30, "head")
  given["log_decay"][:] = 0.0
  zero = np.zeros_like(given["initial_state"])
  beta = given.pop("beta")
  run = compiled(gated_linear_attention)
  found, _ = run(given | {"initial_state": zero})
  key, value = (np.repeat(given[n], 2, axis=2) for n in ("key", "value"))
  scores = np.einsum("btnh,bsnh->bnts", given["query"], key) * DIM**-0.5
  expected = np.einsum("bnts,bsnv->btnv", np.tril(scores), value)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  given.pop("log_decay")
  _, state = compiled(delta_rule_attention)(given | {"beta": 0 * beta})
  np.testing.assert_array_equal(state, given["initial_state"])


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"log_decay": np.zeros((2, 9, 1))}, r"^log_decay: expected \[B, T, N\] = "),
    ({"beta": np.zeros((2, 9))}, r"^beta: expected 3 axes \[B, T, N\], got"),
    ({"initial_state": np.zeros((2, 4, 8, 8))}, r"^initial_state: expected \["),
    ({"segment_ids": np.zeros((2, 8), int)}, r"^segment_ids: expected \[2, 9\] for"),
    ({"key": np.zeros((2, 8, 2, 8), "f"), "value": np.zeros((2, 8, 2, 5), "f")},
     r"^key: expected \[2, 9, K, 8\] for"),
    ({"mask": np.ones((2, 1, 9, 9), bool)}, r"^mask: expected a key mask"),
    ({"is_causal": False}, r"^is_causal: expected True, got False;"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_told(change, message):
  flags = change if "is_causal" in change else {}
  given = arrays(9, "head") | ({} if flags else change)
  with pytest.raises(ValueError, match=message):
    compiled(delta_rule_attention, **flags)(given)


def test_a_lower_bound_of_decays_is_that_of_transformers():
  path = pathlib.Path(__file__).parent / "kimi_gate.npz"
  with np.load(path) as arrays:
    theirs = dict(arrays)
  heads = theirs["A_log"].shape[0]
  params = {
    "rate_kernel": np.zeros((7, heads), np.float32),
    "step_down": theirs["f_a_proj.weight"].T,
    "step_up": theirs["f_b_proj.weight"].T.reshape(4, heads, 4),
    "step_bias": theirs["dt_bias"].reshape(heads, 4),
    "log_rate": theirs["A_log"],
  }
  gates = kimi_delta(lower_bound=-3.5).gates(
    {"params": params}, theirs["inputs"]
  )
  np.testing.assert_allclose(
    gates["log_decay"], theirs["log_decay"], rtol=1e-5, atol=1e-6
  )
  with pytest.raises(ValueError, match=r"^lower_bound: expected below 0"):
    kimi_delta(lower_bound=0.0)


@pytest.mark.parametrize("slopes", ["alibi", "geometric"])
def test_lightning_has_slopes_for_any_number_of_heads(slopes):
  rng = np.random.default_rng(0)
  qkv = rng.standard_normal((3, 1, 9, 3, 4), np.float32)
  options = {"depth": 0.5, "slopes": slopes}
  apply = functools.partial(lightning(**options).apply, {}, is_causal=True)
  expected = recurrent.lightning(*qkv.astype(float), **options)
  np.testing.assert_allclose(
    jax.jit(apply)(*qkv), expected, rtol=1e-5, atol=1e-6
  )


@pytest.mark.parametrize("where", ["cpu", "tpu"])
@pytest.mark.parametrize("scale", [0.01, 0.5, 5.0, 100.0])
def test_decays_of_pairs_keep_their_digits(scale, where):
  rng = np.random.default_rng(5)
  decay = -scale * rng.random((4, 64)).astype(np.float32)
  for row, strong in enumerate((-30.0, -1000.0, -1e30)):
    decay[row, rng.random(64) < 0.1] = strong
  cotangent = rng.normal(size=(4, 64, 64)).astype(np.float32)
  with backend.tracing_for(where):
    found, pullback = jax.vjp(pair_decays, jnp.asarray(decay)[..., None])
  expected, grads = np.ones((4, 64, 64)), np.zeros((4, 64))
  for i in range(64):
    for j in range(i):
      between = decay[:, j + 1 : i + 1].astype(np.float64)
      expected[:, i, j] = np.exp(between.sum(axis=1))
      grads[:, j + 1 : i + 1] += (cotangent * expected)[:, i, j, None]
  np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)
  found = pullback(jnp.asarray(cotangent))[0][..., 0]
  np.testing.assert_allclose(found, grads, rtol=0, atol=1e-6 * abs(grads).max())


@pytest.mark.parametrize("where", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("scale", [0.01, 5.0])
def test_decays_of_channels_keep_their_digits(scale, where):
  rng = np.random.default_rng(6)
  decay = -scale * rng.random((4, 1, 64, 3)).astype(np.float32)
  for row, strong in enumerate((-30.0, -1000.0, -1e30)):
    decay[row, rng.random((1, 64, 3)) < 0.1] = strong
  reader, key = rng.normal(size=(2, 4, 1, 64, 3)).astype(np.float32)
  cotangent = rng.normal(size=(4, 1, 64, 64)).astype(np.float32)

  def scores(reader, key, decay):
    return pairs([reader], [key], decay)[0][0]

  with backend.tracing_for(where):
    found, pullback = jax.vjp(scores, reader, key, decay)
    found_grads = pullback(jnp.asarray(cotangent))
  expected = np.zeros((4, 1, 64, 64))
  grads = [np.zeros(decay.shape) for _ in range(3)]
  for i in range(64):
    for j in range(i + 1):
      between = decay[:, :, j + 1 : i + 1].astype(np.float64)
      left = np.exp(between.sum(axis=2))
      product = reader[:, :, i].astype(np.float64) * key[:, :, j] * left
      expected[:, :, i, j] = product.sum(axis=-1)
      grad = cotangent[:, :, i, j, None]
      grads[0][:, :, i] += grad * key[:, :, j] * left
      grads[1][:, :, j] += grad * reader[:, :, i] * left
      grads[2][:, :, j + 1 : i + 1] += (grad * product)[:, :, None]
  for x, y in zip((found, *found_grads), (expected, *grads), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=2e-6 * abs(y).max())


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_inverses_of_unit_triangles(size):
  lower = np.tril(np.random.default_rng(7).random((2, 1, 3, size, size)), -1)
  expected = np.linalg.inv(np.eye(size) + lower)
  for where in ("cpu", "tpu"):
    with backend.tracing_for(where):
      found = inverse(jnp.asarray(lower, jnp.float32))
    error = abs(found - expected).max() / abs(expected).max()
    assert error < 1e-5, where


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9, 16, 17, 256, 257, 300])
def test_prefixes_of_chunks(count):
  """Products of rotations and reflections, which tell the order of chunks."""
  own = np.random.default_rng(8).normal(size=(2, count, 2, 2))
  own = np.linalg.qr(own).Q
  first = np.array([[[[1.0, 2.0], [-1.0, 3.0]]]] * 2)
  found = chunk_prefixes(lambda x, y: x @ y, *map(jnp.float32, (first, own)))
  state = first[:, 0]
  for i in range(count):
    np.testing.assert_allclose(found[:, i], state, rtol=1e-4, atol=1e-4)
    state = state @ own[:, i]


@pytest.mark.parametrize(
  "name",
  [
    "mamba2",
    "comba",
    "mamba3",
    "rwkv6",
    "rwkv7",
    "delta_product",
    "log_linear",
  ],
)
def test_whichever_array_has_fewer_heads_has_them_repeated(name):
  mechanism = ATTENTIONS[name](**SIZES[name])
  dims = Dims(4, 4, 8, 12, 16)
  variables = jax.jit(functools.partial(mechanism.init, dims=dims))(
    jax.random.key(0)
  )
  inputs, *arrays = calls.normal(
    (2, 12, 16), (2, 12, 2, 8), (2, 12, 4, 8), (2, 12, 1, 8)
  )
  given = mechanism.gates(variables, inputs)
  run = jax.jit(functools.partial(mechanism.apply, is_causal=True))
  repeated = [jnp.repeat(x, 4 // x.shape[2], axis=2) for x in arrays]
  got = run(variables, *arrays, **given)
  expected = run(variables, *repeated, **given)
  np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
