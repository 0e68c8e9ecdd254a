"""Elementwise recurrences: states, segments, and the form of each platform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, mamba_attention, rg_lru_attention
from attention.platform import backend
from tests.attention.calls import assert_close

B, N, H, V = 2, 3, 5, 4
FUNCTIONS = {"mamba": mamba_attention, "rg_lru": rg_lru_attention}


def drawn(name, length, H=H, V=V):
  """The arrays of a call, some of whose decays are 0 or nearly 1."""
  rng = np.random.default_rng(0)
  normal = rng.standard_normal
  value = normal((B, length, N, V))
  if name == "mamba":
    step = np.exp(normal((B, length, N, V)))
    step[:, ::7] = 300.0
    arrays = {
      "query": normal((B, length, 1, H)),
      "key": normal((B, length, N, H)),
      "value": value,
      "step": step,
      "log_rate": normal((N, H, V)),
      "initial_state": normal((B, N, H, V)),
    }
  else:
    log_decay = -np.exp(2.0 * normal((B, length, N, V)))
    log_decay[:, ::7] = -300.0
    arrays = {
      "value": value,
      "log_decay": log_decay,
      "input_gate": rng.uniform(0, 1, value.shape),
      "initial_state": normal((B, N, V)),
    }
  return {n: x.astype(np.float32) for n, x in arrays.items()}


def options(length):
  rng = np.random.default_rng(1)
  return {
    "mask": rng.random((B, 1, 1, length)) < 0.8,
    "segment_ids": np.sort(rng.integers(0, 4, (B, length))),
    "scale": 0.3,
    "return_state": True,
  }


@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("length", [1, 13, 64, 150])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_states_are_the_definition_s(name, length, state, where):
  arrays, call = drawn(name, length), options(length)
  if not state:
    del arrays["initial_state"]
  expected = getattr(definitions, f"{name}_attention")(**arrays, **call)
  with backend.tracing_for(where):
    function = functools.partial(FUNCTIONS[name].__wrapped__, **call)
    found = jax.jit(function)(**arrays)
  for x, y in zip(found, expected, strict=True):
    assert_close(x, y, 1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_platforms_have_the_same_gradients(name):
  arrays, call = drawn(name, 150), options(150)

  def total(arrays):
    out, state = FUNCTIONS[name].__wrapped__(**arrays, **call)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state))

  found = []
  for where in ("cpu", "gpu"):
    with backend.tracing_for(where):
      found.append(jax.jit(jax.grad(lambda x: total(x)))(arrays))
  for x, y in zip(*map(jax.tree.leaves, found), strict=True):
    assert_close(x, y, 3e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_call_goes_on_from_a_state(name):
  """Of an odd number of positions, the first of them masked."""
  length, cut = 41, 17
  arrays = drawn(name, length)
  mask = (
    np.arange(length)[None, None, None] >= np.array([0, 3])[:, None, None, None]
  )
  run = functools.partial(FUNCTIONS[name], return_state=True)
  expected = run(**arrays, mask=mask)
  fixed = {n: arrays.pop(n) for n in ("log_rate",) if n in arrays}
  state, outs = arrays.pop("initial_state"), []
  for part in (slice(cut), slice(cut, length)):
    given = {n: x[:, part] for n, x in arrays.items()}
    mask_of_part = mask[..., part]
    out, state = run(**given, **fixed, initial_state=state, mask=mask_of_part)
    outs.append(out)
  assert_close(np.concatenate(outs, axis=1), expected[0], 1e-6)
  assert_close(state, expected[1], 1e-6)


def test_the_first_unmasked_position_of_a_segment_writes_its_whole_input():
  """Here everything else has a weight of √(1 − 0.25)."""
  shape = (1, 6, 1, 1)
  value, half = np.ones(shape, np.float32), np.full(shape, np.log(0.5), "f4")
  mask = np.array([False, True, True, False, True, True])[None, None, None]
  out = rg_lru_attention(
    value,
    log_decay=half,
    input_gate=value,
    mask=mask,
    segment_ids=np.array([[0, 0, 0, 1, 1, 1]]),
  )
  second = 0.5 + np.sqrt(0.75)
  expected = [0.0, 1.0, second, 0.0, 1.0, second]
  np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_memory_of_gradients_is_linear_in_the_length(name):
  """And far below that of the states of all positions."""

  def temporaries(length):
    arrays = drawn(name, length, 24, 24)

    def total(arrays):
      return jnp.sum(jnp.sin(FUNCTIONS[name].__wrapped__(**arrays)))

    compiled = jax.jit(jax.grad(total)).lower(arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  short, long = temporaries(1024), temporaries(4096)
  assert long < 4.4 * short
  if name == "mamba":
    assert long < 0.25 * 4 * 4096 * B * N * 24 * 24
