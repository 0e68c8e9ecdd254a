"""MesaNet solves its systems, and its gradients are those of the solution."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, definitions, mesa_attention
from tests.attention import state_cases as cases
from tests.attention.state_cases import BATCH, DIM, HEADS, KV_HEADS, VALUE

assert_defined = partial(
  cases.assert_defined, mesa_attention, definitions.mesa_attention
)


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


@pytest.mark.parametrize("length", [1, 7, 64, 65, 200])
def test_values_and_states(length):
  assert_defined(given(length))
  arrays = given(length)
  arrays.pop("initial_state")
  assert_defined(arrays, scale=0.7, **cases.options(length))


def test_all_gradients():
  options = {**cases.options(150), "scale": 0.7}
  cases.assert_gradients(mesa_attention, naive, given(150), **options)


@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e-10, 1e10, 1e25])
def test_gradients_grow_with_the_cotangent(scale):
  arrays = given(65)
  out, pullback = jax.vjp(
    lambda options: cases.call(mesa_attention, options)[0], arrays
  )
  cotangent = jax.random.normal(jax.random.key(0), out.shape)
  (expected,) = pullback(cotangent)
  (scaled,) = pullback(scale * cotangent)
  for name, x in expected.items():
    np.testing.assert_allclose(
      scaled[name] / scale, x, atol=1e-5 * jnp.abs(x).max(), err_msg=name
    )


def test_one_call_goes_on_from_another():
  arrays = given(100)
  first, second = (
    {
      name: x if name in ("initial_state", "regularizer") else x[:, part]
      for name, x in arrays.items()
    }
    for part in (slice(0, 37), slice(37, None))
  )
  whole, last = cases.call(mesa_attention, arrays)
  before, state = cases.call(mesa_attention, first)
  after, found = cases.call(mesa_attention, second, initial_state=state)
  joined = jnp.concatenate([before, after], axis=1)
  np.testing.assert_allclose(joined, whole, atol=5e-6)
  np.testing.assert_allclose(found, last, atol=5e-6)


@pytest.mark.parametrize("low", [-1e4, 0.0])
def test_extreme_decays_stay_finite(low):
  arrays = given(130)
  arrays["log_decay"][:] = low
  assert_defined(arrays)

  @jax.jit
  @jax.grad
  def gradients(arrays):
    out, state = cases.call(mesa_attention, arrays)
    return jnp.sum(out**2) + jnp.sum(state**2)

  for name, gradient in gradients(arrays).items():
    assert np.isfinite(gradient).all(), name


def test_the_error_falls_with_the_iterations():
  """One key a thousand times, and a small λ: the condition is 10⁵."""
  arrays = given(300)
  arrays["key"][:, 5:] = arrays["key"][:, 5:6]
  arrays["beta"][:], arrays["log_decay"][:] = 1.0, 0.0
  arrays["regularizer"][:] = 3e-3
  expected = definitions.mesa_attention(**arrays)

  def error(count):
    out, _ = cases.call(partial(mesa_attention, num_iterations=count), arrays)
    return np.abs(out - expected).max() / np.abs(expected).max()

  errors = [error(count) for count in (2, 8, 30)]
  assert errors[0] > 1e-2 > errors[1] > errors[2]
  assert errors[2] < 1e-4


def test_hidden_positions_may_hold_anything():
  arrays, mask = given(70), np.arange(70) % 3 != 1
  options = {"mask": mask[None, None, None]}
  expected = cases.call(mesa_attention, arrays, **options)
  for name in ("key", "value", "beta", "log_decay"):
    arrays[name][:, ~mask] = np.nan
  found = cases.call(mesa_attention, arrays, **options)
  for one, other in zip(found, expected, strict=True):
    np.testing.assert_array_equal(one, other)


def test_many_chunks_at_once_are_the_loop():
  arrays, options = given(150), cases.options(150)
  cases.assert_many_chunks_are_the_loop(mesa_attention, arrays, **options)


def test_bfloat16():
  both = mesa_attention, definitions.mesa_attention
  cases.assert_bfloat16(*both, given(70))


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"initial_state": np.zeros((2, 4, 8, 8), "f")},
     r"^initial_state: expected \[B, N, H, H\+V\] = \(2, 4, 8, 13\)"),
    ({"regularizer": np.ones((4, 7), "f")}, r"^regularizer: expected \[4, 8\]"),
    ({"num_iterations": 0}, r"^num_iterations: expected an int of at least 1"),
    ({"is_causal": False}, r"^is_causal: expected True, got False;"),
  ],
)  # fmt: skip
def test_what_does_not_fit_is_told(change, message):
  arrays = cases.as_jax({**given(9), **change})
  qkv = [arrays.pop(name) for name in ("query", "key", "value")]
  with pytest.raises(ValueError, match=message):
    mesa_attention(*qkv, **arrays)


def test_hyperparameters():
  for options in ({"num_iterations": 0}, {"min_regularizer": 1.0}):
    (name,) = options
    with pytest.raises(ValueError, match=f"^{name}: expected"):
      ATTENTIONS["mesa"](**options)
