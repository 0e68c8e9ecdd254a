"""Functions with a state are their definitions, and what recurrences share."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  ATTENTIONS,
  delta_rule_attention,
  gated_linear_attention,
  kimi_delta,
  lightning,
)
from attention.definitions import gated_linear
from attention.platform import backend
from attention.recurrent.scan import chunk_prefixes
from attention.recurrent.triangular import inverse, pair_decays, pairs
from attention.testing import assert_close
from tests.attention import calls, state_cases
from tests.attention.state_cases import BATCH, CASES, DIM, OTHERS, RULES, WRITES
from tests.refusals import assert_refused

LENGTHS = {
  1: ("delta-channel", "product-head", "rwkv7-channel"),
  7: ("gated-channel", "gates-channel", "rwkv6-channel"),
  64: ("delta-none", "rwkv7-channel"),
  65: ("gated-head", "delta-none", "comba-head"),
}
"""Of each length some rules, and of each rule a length below that of gradients."""


def of(names):
  """Parameters of a test: the cases of these names."""
  return pytest.mark.parametrize("case", [CASES[x] for x in names], ids=repr)


@pytest.mark.parametrize(
  ("case", "length"),
  [
    *((CASES[name], n) for n, names in LENGTHS.items() for name in names),
    # The contract has lengths within a chunk.
    *((case, n) for case in OTHERS for n in (1, 64, 65)),
    # Around the end of a mini-batch.
    *((CASES[x], n) for x in ("titans", "ttt_linear") for n in (5, 6)),
  ],
  ids=repr,
)
def test_values_and_states(case, length):
  """Of a call, and of one that goes on from it."""
  state_cases.assert_continues(case, length)


@of(CASES)
def test_all_gradients(case):
  """Of query, key, value, gates, parameters and the first state."""
  state_cases.assert_gradients(case, case.given(150), state_cases.options(150))


STRONG = [
  x.name
  for x in (*RULES, *OTHERS[:7])
  if x.name not in ("delta-none", "product-head")
]


@of(STRONG)
def test_gradients_of_strong_decays(case):
  """Where the gradient of a decay is far below the others.

  Of the product rule, a decay of 1 lies between two writes at one position.
  """
  given = case.given(150)
  given["log_decay"][:] = -10.0
  state_cases.assert_gradients(
    case, given, state_cases.options_without_effect(150)
  )


@of([*STRONG, "product-head", "titans"])
def test_extreme_decays_stay_finite(case):
  """Everything is forgotten at once, again and again; nothing ever is."""
  given = case.given(150)
  for low in (-1e4, -90.0, 0.0):
    given["log_decay"][:] = low
    if case.name == "momentum_delta":
      given["momentum_decay"][:] = low
      given["beta"] *= 0.2  # Without decays, a state with more momentum grows.
    if case.name == "titans":
      given["log_momentum"][:] = min(low, -0.1)
    # The condition number of gka is 51, with one key alone as its past.
    tolerance = 5e-5 if case.name == "gka" else 2e-5
    state_cases.assert_finite(case, given, tolerance)


@of(["delta-head", "mesa", "gka", "log_linear", "momentum_delta"])
def test_bfloat16_is_computed_in_float32(case):
  """And the result is rounded."""
  given = case.given(70)
  state = given.pop("initial_state")
  half = {name: x.astype(jnp.bfloat16) for name, x in given.items()}
  run = state_cases.jit_with_state(case.function)
  found, last = run(half | {"initial_state": state})
  assert found.dtype == jnp.bfloat16
  assert jax.tree.leaves(last)[0].dtype == jnp.float32
  wide = {name: np.asarray(x, np.float32) for name, x in half.items()}
  expected = case.definition(**wide, initial_state=state)
  assert_close(np.asarray(found, np.float32), expected, 5e-3)


@of([x.name for x in RULES])
def test_chunks_give_what_positions_do(case):
  """A CPU takes a call that is not differentiated position by position."""
  given = case.given(150) | state_cases.options(150)
  run = state_cases.jit_with_state(case.function)
  rest = {name: given.pop(name) for name in ("mask", "segment_ids")}
  call = jax.jit(lambda x: run(x | rest))
  in_chunks = jax.jit(lambda x: jax.vjp(call, x)[0])
  state_cases.assert_values(in_chunks(given), call(given), 2e-6)
  writes = WRITES if case.mechanism == "product" else 1
  loops = [str(jax.make_jaxpr(f)(given)) for f in (call, in_chunks)]
  positions = 64 * -(-150 * writes // 64)
  assert [f"length={positions}" in x for x in loops] == [True, False]


NORMALIZED = "delta-none", "delta-channel", "gates-channel", "comba-head"


@of([*NORMALIZED, "product-head", "mesa"])
def test_normalized_keys(case):
  """x / √(Σ x² + 10⁻⁶) by hand, as in fla's `use_qk_l2norm_in_kernel`.

  Among them are keys that 10⁻⁶ shortens, zeros, and keys that a mask hides.
  """
  given = case.given(70)
  length = np.linspace(0.5, 9.0, 70, dtype=np.float32)
  given["key"] *= length.reshape(70, *[1] * (given["key"].ndim - 2))
  given["key"][:, 5] *= 1e-4
  given["key"][:, 6] = 0.0
  mask = np.ones((BATCH, 1, 1, 70), bool)
  mask[:, :, :, 9:12] = False

  def unit(given):
    def scaled(x):
      return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)

    made = {name: scaled(given[name]) for name in ("query", "key")}
    return case.definition(**given | made, mask=mask, return_state=True)

  call = {"normalize_keys": True, "mask": mask, "return_state": True}
  run = functools.partial(case.function, **call)
  spoiled = given | {"key": given["key"].copy()}
  spoiled["key"][:, 9] = np.nan
  more = {"spoiled": spoiled, "tolerance": 3e-5}
  calls.assert_defined(lambda x: run(**x), unit, given, **more)


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


def test_known_special_cases():
  """No decay is linear attention without a normaliser; β of 0 changes nothing."""
  given = CASES["delta-head"].given(30)
  given["log_decay"][:] = 0.0
  zero = np.zeros_like(given["initial_state"])
  beta = given.pop("beta")
  run = state_cases.jit_with_state(gated_linear_attention)
  found, _ = run(given | {"initial_state": zero})
  key, value = (np.repeat(given[n], 2, axis=2) for n in ("key", "value"))
  scores = np.einsum("btnh,bsnh->bnts", given["query"], key) * DIM**-0.5
  expected = np.einsum("bnts,bsnv->btnv", np.tril(scores), value)
  np.testing.assert_allclose(found, expected, atol=1e-5)
  given.pop("log_decay")
  _, state = state_cases.jit_with_state(delta_rule_attention)(
    given | {"beta": 0 * beta}
  )
  np.testing.assert_array_equal(state, given["initial_state"])


def zeros(*shape):
  return np.zeros(shape, np.float32)


SMALL = {x: CASES[x].given(9)["initial_state"] for x in CASES}
REFUSED = {
  "delta-head": (
    {"log_decay": zeros(2, 9, 1)},
    {"beta": zeros(2, 9)},
    {"initial_state": zeros(2, 4, 8, 8)},
    {"segment_ids": np.zeros((2, 8), int)},
    {"key": zeros(2, 8, 2, 8), "value": zeros(2, 8, 2, 5)},
    {"mask": np.ones((2, 1, 9, 9), bool)},
  ),
  "mesa": (
    {"initial_state": zeros(2, 4, 8, 8)},
    {"regularizer": zeros(4, 7)},
    {"num_iterations": 0},
  ),
  "gka": (
    {"initial_state": zeros(2, 4, 8, 8)},
    {"ridge_ratio": 0.0},
    {"num_iterations": 0},
  ),
  "gsa": ({"initial_state": zeros(2, 4, 7, 8)},),
  "log_linear": (
    {"level_scales": zeros(2, 9, 4, 4)},
    {"initial_state": SMALL["log_linear"]._replace(sums=zeros(2, 4, 8, 8, 5))},
  ),
  "momentum_delta": (
    {"initial_state": zeros(2, 4, 8, 5)},
    {"eta": zeros(2, 9, 3)},
  ),
  "precond_delta": (
    {
      "initial_state": SMALL["precond_delta"]._replace(memory=zeros(2, 4, 8, 4))
    },
    {"squash": 2.5},
  ),
  "titans": (
    {"initial_state": SMALL["titans"]._replace(start=zeros(2, 1, 8, 5))},
    {"minibatch_size": 0},
    {"log_decay": zeros(2, 3, 4)},
  ),
  "ttt_linear": (
    {"value": zeros(2, 9, 2, 5)},
    ("position_offset", {"minibatch_size": 7}),
    {"minibatch_size": 0},
    {"initial_state": SMALL["ttt_linear"]._replace(gradient=zeros(2, 1, 9, 8))},
  ),
  "mlstm": (
    {"initial_state": SMALL["mlstm"]._replace(maximum=zeros(2, 4, 1))},
  ),
}


@of(REFUSED)
def test_what_does_not_fit_is_told(case):
  def call(**change):
    given = case.given(9) | change
    static = {n: x for n, x in given.items() if isinstance(x, int | float)}
    traced = {n: x for n, x in given.items() if n not in static}
    jax.eval_shape(functools.partial(case.function, **static), **traced)

  assert_refused(call, {"is_causal": False}, *REFUSED[case.name])


@pytest.mark.parametrize(
  ("name", "options"),
  [
    ("mesa", {"num_iterations": 0}),
    ("mesa", {"min_regularizer": 1.0}),
    ("gka", {"num_iterations": 0}),
    ("gka", {"ridge_ratio": -1.0}),
    ("gsa", {"temperature": 0.0}),
    ("titans", {"max_rate": 0.0}),
    ("ttt_linear", {"base_rate": 0.0}),
    ("precond_delta", {"squash": 0.5}),
    ("kimi_delta", {"lower_bound": 0.0}),
  ],
)
def test_hyperparameters_that_do_not_fit_are_told(name, options):
  assert_refused(ATTENTIONS[name], options)


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


@pytest.mark.parametrize("slopes", ["alibi", "geometric"])
def test_lightning_has_slopes_for_any_number_of_heads(slopes):
  rng = np.random.default_rng(0)
  qkv = rng.standard_normal((3, 1, 9, 3, 4), np.float32)
  options = {"depth": 0.5, "slopes": slopes}
  apply = functools.partial(lightning(**options).apply, {}, is_causal=True)
  expected = gated_linear.lightning(*qkv.astype(float), **options)
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
