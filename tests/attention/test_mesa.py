"""MesaNet solves its systems, and its gradients are those of the solution."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, definitions, mesa_attention
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.calls import assert_refused
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS, VALUE

BOTH = mesa_attention, definitions.mesa_attention
SCALED = [partial(function, scale=0.7) for function in BOTH]


def given(length):
  """Arrays with a first state, that of 20 positions."""
  rng = np.random.default_rng(3)
  key = rng.normal(size=(BATCH, HEADS, 20, DIM)) * DIM**-0.5
  value = rng.normal(size=(BATCH, HEADS, 20, DIM + VALUE))
  value[..., :DIM] = key
  return cases.arrays(
    length,
    beta=rng.uniform(size=(BATCH, length, HEADS)),
    regularizer=0.25 + rng.exponential(size=(HEADS, DIM)),
    initial_state=np.swapaxes(key, -2, -1) @ value,
  )


def naive(given, mask, segment_ids, scale=1.0):
  """All systems at once, to be differentiated in float64."""
  decays, first = cases.decays(given["log_decay"], mask, segment_ids)
  key, value = (
    jnp.repeat(given[name], HEADS // KV_HEADS, axis=2)
    for name in ("key", "value")
  )
  written = given["beta"][..., None] * key
  value = jnp.concatenate([key, value], axis=3)
  state = jnp.einsum("bnts,bsni,bsnj->btnij", decays, written, value)
  first = jnp.moveaxis(first, 1, 2)[..., None, None]
  state += first * given["initial_state"][:, None]
  ridge = jax.vmap(jnp.diag)(given["regularizer"])[None, None]
  x = jnp.linalg.solve(state[..., :DIM] + ridge, given["query"][..., None])
  out = jnp.einsum("btni,btniv->btnv", x[..., 0], state[..., DIM:])
  return scale * out, state[:, -1]


@pytest.mark.parametrize("length", [1, 7, 64, 65])
def test_values_and_states(length):
  cases.assert_goes_on(*BOTH, given(2 * length))


def test_normalized_keys():
  """x / √(Σ x² + 10⁻⁶) by hand, ahead of the definition."""
  arrays = given(70)
  arrays["query"] = arrays["query"] * 3.0
  arrays["key"] = arrays["key"] * np.linspace(1e-3, 5.0, 70)[:, None, None]
  unit = dict(arrays)
  for name in ("query", "key"):
    x = np.asarray(arrays[name], np.float64)
    unit[name] = x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)
  run = cases.compiled(mesa_attention, normalize_keys=True)
  expected = cases.call(definitions.mesa_attention, unit)
  for got, wanted in zip(
    run(jax.tree.map(cases.as_float32, arrays)), expected, strict=True
  ):
    assert_close(got, wanted, 1e-5)


def test_all_gradients():
  cases.assert_gradients(*SCALED, partial(naive, scale=0.7), given(150))


def test_gradients_of_strong_decays():
  cases.assert_strong_decays(*SCALED, partial(naive, scale=0.7), given(150))


def test_extreme_decays_stay_finite():
  arrays = given(150)
  for low in (-1e4, 0.0):
    arrays["log_decay"][:] = low
    cases.assert_finite(*SCALED, arrays)


def test_gradients_grow_with_the_cotangent():
  @jax.jit
  def gradients(arrays, factor):
    def total(arrays):
      out, _ = cases.call(mesa_attention, arrays)
      weights = np.random.default_rng(0).normal(size=out.shape)
      return jnp.sum(out * (factor * weights.astype(np.float32)))

    return jax.grad(total)(arrays)

  expected = gradients(given(65), np.float32(1.0))
  for scale in np.float32([1e-30, 1e-18, 1e-10, 1e10, 1e25]):
    for name, x in gradients(given(65), scale).items():
      other = np.asarray(expected[name])
      bound = 1e-5 * np.abs(other).max()
      np.testing.assert_allclose(x / scale, other, atol=bound, err_msg=name)


def test_the_error_falls_with_the_iterations():
  """One key a thousand times, and a small λ: the condition is 10⁵."""
  arrays = given(300)
  arrays["key"][:, 5:] = arrays["key"][:, 5:6]
  arrays["beta"][:], arrays["log_decay"][:] = 1.0, 0.0
  arrays["regularizer"][:] = 3e-3
  expected = definitions.mesa_attention(**arrays)

  def error(count):
    out, _ = cases.compiled(mesa_attention, num_iterations=count)(arrays)
    return np.abs(out - expected).max() / np.abs(expected).max()

  errors = [error(count) for count in (2, 8, 30)]
  assert errors[0] > 1e-2 > errors[1] > errors[2]
  assert errors[2] < 1e-4


def test_bfloat16():
  cases.assert_bfloat16(*BOTH, given(70))


def test_what_does_not_fit_is_told():
  assert_refused(
    lambda **change: jax.eval_shape(
      lambda: cases.call(mesa_attention, cases.as_jax({**given(9), **change}))
    ),
    (
      (
        r"initial_state: expected \[B, N, H, H\+V\] = \(2, 4, 8, 13\)",
        {"initial_state": np.zeros((2, 4, 8, 8), "f")},
      ),
      (
        r"regularizer: expected \[4, 8\]",
        {"regularizer": np.ones((4, 7), "f")},
      ),
      ("num_iterations: expected an int of at least 1", {"num_iterations": 0}),
      ("is_causal: expected True, got False;", {"is_causal": False}),
    ),
  )
  for options in ({"num_iterations": 0}, {"min_regularizer": 1.0}):
    (name,) = options
    assert_refused(ATTENTIONS["mesa"], [(f"{name}: expected", options)])
