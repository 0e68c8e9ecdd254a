"""Recurrences whose values have more heads than queries and keys, as in Qwen3-Next."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention

SIZES = {"B": 2, "T": 21, "R": 3, "N": 6, "Q": 2, "K": 3, "U": 6, "H": 4}
SIZES |= {"V": 5, "L": 6, "M": 7}
POSITIVE = (
  "beta",
  "learning_rate",
  "level_scales",
  "regularizer",
  "slot_weights",
)


def has_value_heads(name):
  """Whether the value of a function has the letter U for its heads."""
  function = getattr(attention, name)
  if not name.endswith("_attention") or not inspect.isfunction(function):
    return False
  value = inspect.signature(function).parameters.get("value")
  return value is not None and "U" in str(value.annotation)


FUNCTIONS = sorted(filter(has_value_heads, attention.__all__))
assert len(FUNCTIONS) >= 12


def drawn(function):
  """An array for every option that a call needs, by the letters of its annotation."""
  rng, arrays = np.random.default_rng(3), {}
  for name, x in inspect.signature(function).parameters.items():
    if x.default is not x.empty and name not in ("log_decay", "beta"):
      continue
    letters = str(x.annotation).rpartition("'")[0].rpartition("'")[2].split()
    if letters == ["..."]:  # The decays of channels.
      letters = ["B", "T", "N", "H"]
    array = rng.standard_normal([SIZES[x] for x in letters], np.float32)
    if name.startswith("log_"):
      array = -np.abs(array)
    if name in POSITIVE:
      array = 1.0 / (1.0 + np.exp(-array))
    if name in ("key", "removal", "replacement"):
      array /= np.linalg.norm(array, axis=-1, keepdims=True)
    arrays[name] = jnp.asarray(array)
  return arrays


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_repeated_queries_and_keys(name):
  function = getattr(attention, name)
  arrays = drawn(function)
  repeated = dict(arrays)
  for array in ("query", "key"):
    heads = SIZES["Q" if array == "query" else "K"]
    repeated[array] = jnp.repeat(arrays[array], SIZES["N"] // heads, axis=-2)

  def loss(given):
    out = function(**given)
    return jnp.sum(jnp.sin(out)), out

  grads, out = jax.grad(loss, has_aux=True)(arrays)
  expected, wanted = jax.grad(loss, has_aux=True)(repeated)
  assert out.shape == (2, 21, 6, arrays["value"].shape[-1])
  np.testing.assert_allclose(out, wanted, rtol=0, atol=2e-6)
  for array, got in grads.items():
    grad = expected[array]
    if array in ("query", "key"):
      shape = *got.shape[:-1], -1, got.shape[-1]
      grad = grad.reshape(shape).sum(axis=-2)
    np.testing.assert_allclose(got, grad, rtol=0, atol=2e-5, err_msg=array)
