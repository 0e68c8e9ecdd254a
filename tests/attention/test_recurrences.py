"""The functions of the recurrence are their definitions."""

from functools import partial
import importlib.metadata
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  definitions,
  delta_product_attention,
  delta_rule_attention,
  gated_linear_attention,
  lightning,
  platform,
  rwkv7_attention,
)
from attention.definitions import recurrent
from tests.attention.forms import thorough
from training import compiler

BATCH, HEADS, KV_HEADS, DIM, VALUE = 2, 4, 2, 8, 5
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
]
FUNCTIONS = {
  "gated": gated_linear_attention,
  "delta": delta_rule_attention,
  "gates": delta_rule_attention,
  "product": delta_product_attention,
  "rwkv7": rwkv7_attention,
  "comba": delta_rule_attention,
}
"""With `comba`, the delta rule has keys of what is erased; with `gates`, gates too."""

WRITES = 3
SHORTER = {
  1: [*RULES[3:4], *RULES[6:8]],
  7: [*RULES[1:2], *RULES[5:7]],
  64: [*RULES[2:3], *RULES[7:8]],
  65: [*RULES[4:6], *RULES[8:]],
}
"""Forms that the default suite tries at lengths below the longest."""


def with_shorter(longest, shorter):
  """All forms at the longest length, and some of them at each shorter one."""
  return pytest.mark.parametrize(
    ("rule", "form", "length"),
    [
      pytest.param(*x, length, marks=[] if x in tried else pytest.mark.thorough)
      for length, tried in {**shorter, longest: RULES}.items()
      for x in RULES
    ],
  )


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
  if rule in ("gated", "rwkv7"):
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
  if rule == "rwkv7":
    moved = rng.normal(size=(BATCH, length, HEADS, DIM))
    moved /= np.linalg.norm(moved, axis=-1, keepdims=True)
    given |= {"removal": -moved, "replacement": rate * moved}
  given = {name: np.asarray(x, np.float32) for name, x in given.items()}
  return function, getattr(definitions, function.__name__), given


def options(length):
  """A key mask, and segments of random lengths."""
  rng = np.random.default_rng(1)
  return {
    "mask": rng.random((BATCH, 1, 1, length)) < 0.8,
    "segment_ids": np.cumsum(rng.random((BATCH, length)) < 0.05, axis=1) % 3,
  }


def call(function, given, **more):
  given = {name: jnp.asarray(x) for name, x in given.items()}
  more = {name: jnp.asarray(x) for name, x in more.items()}
  qkv = [given.pop(name) for name in ("query", "key", "value")]
  compiled = jax.jit(function, static_argnames="return_state")
  return compiled(*qkv, **given, **more, return_state=True)


@with_shorter(200, SHORTER)
def test_values_and_states(rule, form, length):
  function, definition, given = chosen(rule, length, form)
  for more in ({}, options(length)):
    found = call(function, given, **more)
    expected = definition(**given, **more, return_state=True)
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_allclose(one, other, atol=5e-6, rtol=5e-6)
    assert found[0].dtype == found[1].dtype == jnp.float32


def naive(given, mask, segment_ids):
  """The recurrence by `jax.lax.scan`, to be differentiated in float64."""
  query = given["query"]
  length = query.shape[1]
  along = {
    name: jnp.repeat(x, HEADS // KV_HEADS, axis=x.ndim - 2)
    if name in ("key", "value", "erase_key")
    else x
    for name, x in given.items()
    if name != "initial_state"
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
    state = jnp.where(now["seen"][:, None, None, None], after, state)
    return state, DIM**-0.5 * read(state, now["query"])

  along |= {"seen": jnp.asarray(mask[:, 0, 0]), "first": jnp.asarray(begins)}
  along = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), along)
  state, out = jax.lax.scan(step, given["initial_state"], along)
  return jnp.moveaxis(out, 0, 1), state


@with_shorter(150, dict.fromkeys(SHORTER, ()))
def test_all_gradients(rule, form, length):
  """Of query, key, value, decay, β and the first state, from both results."""
  function, _, given = chosen(rule, length, form)
  more = options(length)
  rng = np.random.default_rng(2)
  of_out = rng.normal(size=(BATCH, length, HEADS, VALUE))
  of_state = rng.normal(size=(BATCH, HEADS, DIM, VALUE))

  def loss(run, given):
    out, state = run(given)
    return jnp.sum(out * of_out) + jnp.sum(state * of_state)

  found = jax.jit(
    jax.grad(partial(loss, lambda given: call(function, given, **more)))
  )(given)
  with jax.enable_x64(True):
    wide = {name: jnp.asarray(x, jnp.float64) for name, x in given.items()}
    expected = jax.jit(
      jax.grad(partial(loss, lambda given: naive(given, **more)))
    )(wide)
    expected = jax.device_get(expected)
  for name, other in expected.items():
    scale = max(1.0, np.abs(other).max())
    np.testing.assert_allclose(
      found[name], other, atol=1e-5 * scale, err_msg=name
    )


@pytest.mark.parametrize("rule", FUNCTIONS)
def test_one_call_goes_on_from_another(rule):
  function, _, given = chosen(rule, 100, "channel")
  whole, last = call(function, given)
  first, second = (
    {
      name: x if name == "initial_state" else x[:, part]
      for name, x in given.items()
    }
    for part in (slice(0, 37), slice(37, None))
  )
  before, state = call(function, first)
  after, found = call(function, second | {"initial_state": state})
  joined = jnp.concatenate([before, after], axis=1)
  np.testing.assert_allclose(joined, whole, atol=3e-6)
  np.testing.assert_allclose(found, last, atol=3e-6)


@pytest.mark.parametrize(
  ("rule", "form"),
  [
    ("gated", "head"),
    ("delta", "channel"),
    ("rwkv7", "channel"),
    ("comba", "head"),
    *thorough(("gated", "channel"), ("delta", "head")),
  ],
)
def test_extreme_decays_stay_finite(rule, form):
  """Everything is forgotten at once, again and again; nothing ever is."""
  function, definition, given = chosen(rule, 130, form)

  @jax.jit
  @partial(jax.grad, has_aux=True)
  def gradients(given):
    out, state = call(function, given)
    return jnp.sum(out**2) + jnp.sum(state**2), (out, state)

  for low in (-1e4, -90.0, 0.0):
    given["log_decay"] = np.full_like(given["log_decay"], low)
    by_name, found = gradients(given)
    expected = definition(**given, return_state=True)
    for one, other in zip(found, expected, strict=True):
      np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)
    for name, gradient in by_name.items():
      assert np.isfinite(gradient).all(), name


@pytest.mark.parametrize("rule", FUNCTIONS)
def test_hidden_positions_may_hold_anything(rule):
  function, _, given = chosen(rule, 70, "channel")
  mask = np.arange(70) % 3 != 1
  expected = call(function, given, mask=mask[None, None, None])
  for name in given.keys() - {"query", "initial_state"}:
    given[name][:, ~mask] = np.nan
  found = call(function, given, mask=mask[None, None, None])
  np.testing.assert_array_equal(found[0], expected[0])
  np.testing.assert_array_equal(found[1], expected[1])


def test_bfloat16_is_computed_in_float32():
  function, definition, given = chosen("delta", 70, "head")
  half = {name: jnp.asarray(x, jnp.bfloat16) for name, x in given.items()}
  found, state = call(function, half)
  assert (found.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
  exact = {name: np.asarray(x, np.float32) for name, x in half.items()}
  expected, last = definition(**exact, return_state=True)
  np.testing.assert_allclose(state, last, atol=1e-5)
  np.testing.assert_allclose(
    found.astype(jnp.float32), expected, atol=4e-3, rtol=8e-3
  )


def test_known_special_cases():
  """No decay is linear attention without a normaliser; β of 0 changes nothing."""
  given = arrays(30, "head")
  given["log_decay"][:] = 0.0
  zero = np.zeros_like(given["initial_state"])
  beta = given.pop("beta")
  found, _ = call(gated_linear_attention, given | {"initial_state": zero})
  key, value = (np.repeat(given[n], 2, axis=2) for n in ("key", "value"))
  scores = np.einsum("btnh,bsnh->bnts", given["query"], key) * DIM**-0.5
  expected = np.einsum("bnts,bsnv->btnv", np.tril(scores), value)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  given.pop("log_decay")
  _, state = call(delta_rule_attention, given | {"beta": 0 * beta})
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
  ],
)  # fmt: skip
def test_what_does_not_fit_is_told(change, message):
  given = arrays(9, "head") | change
  with pytest.raises(ValueError, match=message):
    call(delta_rule_attention, given)


def test_it_is_causal_by_definition():
  given = arrays(9, "head")
  qkv = [jnp.asarray(given[n]) for n in ("query", "key", "value")]
  with pytest.raises(
    ValueError, match=r"^is_causal: expected True, got False;"
  ):
    gated_linear_attention(
      *qkv, log_decay=jnp.asarray(given["log_decay"]), is_causal=False
    )


@pytest.mark.parametrize(
  ("rule", "form"),
  [
    RULES[0],
    *RULES[3:5],
    RULES[7],
    *thorough(*RULES[1:3], *RULES[5:7], RULES[8]),
  ],
)
def test_many_parts_at_once_are_the_loop(rule, form):
  """As an accelerator does it: values, states and gradients, 150 in 3 parts."""
  function, _, given = chosen(rule, 150, form)
  given = {name: jnp.asarray(x) for name, x in given.items()}

  def found(where, more):
    def run(given):
      out, state = call(function, given, **more)
      return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.sin(state)), (out, state)

    with platform.tracing_for(where):
      return jax.jit(jax.value_and_grad(run, has_aux=True))(given)

  # Without a mask and segments for one rule.
  for more in (options(150), *([{}] if form == "none" else [])):
    (_, values), gradients = found("gpu", more)
    (_, expected), expected_gradients = found("cpu", more)
    got = jax.tree.leaves((values, gradients))
    want = jax.tree.leaves((expected, expected_gradients))
    for one, other in zip(got, want, strict=True):
      np.testing.assert_allclose(one, other, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("flag", ["", f"{compiler.FLAG}="])
def test_a_program_with_the_faulty_fusion_is_warned(flag):
  """Only where it gives a state, which may be a constant of its program."""
  code = """
import warnings
import jax, jax.numpy as jnp
from attention import delta_rule_attention
x, beta = jnp.ones((2, 16, 1, 8)), jnp.ones((2, 16, 1))

def call(state):
  return delta_rule_attention(x, x, x, beta=beta, initial_state=state)

for state in (None, jnp.zeros((2, 1, 8, 8))):
  with warnings.catch_warnings(record=True) as found:
    warnings.simplefilter("always")
    jax.jit(lambda: call(state))()
  print([str(x.message) for x in found])
"""
  out = subprocess.run(
    [sys.executable, "-c", code],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flag},
    cwd=pathlib.Path(__file__).parent.parent.parent,
    capture_output=True,
    text=True,
    check=True,
  ).stdout.splitlines()
  assert out[0] == "[]"
  is_faulty = compiler.is_faulty(importlib.metadata.version("jaxlib"))
  assert (f"XLA_FLAGS={compiler.FLAG}=" in out[1]) == (is_faulty and not flag)


def test_lightning_has_slopes_for_any_number_of_heads():
  rng = np.random.default_rng(0)
  qkv = rng.standard_normal((3, 1, 9, 3, 4), np.float32)
  out = lightning(depth=0.5).apply({}, *jnp.asarray(qkv), is_causal=True)
  expected = recurrent.lightning(*qkv.astype(float), depth=0.5)
  np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
