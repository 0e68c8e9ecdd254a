"""Functions, definitions and records are what flash-linear-attention computes.

Its vectors are in this folder, with the script that made them.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import comba, definitions, delta_rule_attention
from attention.definitions import recurrent

PEER = dict(np.load(pathlib.Path(__file__).parent / "fla_comba.npz"))
NAMES = {
  "q": "query",
  "k": "key",
  "v": "value",
  "p": "erase_key",
  "beta": "beta",
  "g": "log_decay",
  "initial_state": "initial_state",
}


def part(folder):
  """The arrays of the file under a name."""
  prefix = f"{folder}/"
  return {n.removeprefix(prefix): x for n, x in PEER.items() if prefix in n}


GIVEN = {NAMES[name]: x for name, x in part("given").items()}
RAW, PARAMS = part("raw"), part("params")
QKV = RAW["query"], RAW["key"], GIVEN["value"]


def assert_equal(found, expected, share=2e-5):
  """Up to a share of the largest value."""
  atol = share * np.abs(expected).max()
  np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.fixture(scope="module", name="with_gradients")
def of_function():
  """Results of the function, and its gradients by what it is given."""

  @jax.jit
  @jax.grad
  def gradients(given):
    out, state = delta_rule_attention(**given, return_state=True)
    loss = jnp.sum(out * PEER["out_cotangent"])
    return loss + jnp.sum(state * PEER["state_cotangent"])

  call = jax.jit(delta_rule_attention, static_argnames="return_state")
  return call(**GIVEN, return_state=True), gradients(GIVEN)


def test_comba_has_the_values_and_gradients_of_its_authors(with_gradients):
  """Of 71 positions, two of which decay by e⁻³⁰."""
  assert GIVEN["log_decay"].min() < -30.0
  (out, state), gradients = with_gradients
  assert_equal(out, PEER["out"])
  assert_equal(state, PEER["state"])
  for name, expected in part("gradient").items():
    assert_equal(gradients[NAMES[name]], expected, 1e-4)


def test_definitions_of_comba_are_its_authors():
  out, state = definitions.delta_rule_attention(**GIVEN, return_state=True)
  assert_equal(out, PEER["out"])
  assert_equal(state, PEER["state"])
  options = {"initial_state": GIVEN["initial_state"], "inputs": PEER["inputs"]}
  assert_equal(recurrent.comba(*QKV, **options, **PARAMS), PEER["out"])


def test_comba_reads_its_gates_and_decodes_as_its_authors():
  """17 positions and then one by one; the cache is the state."""
  mechanism, variables = comba(), {"params": PARAMS}
  read = mechanism.gates(variables, jnp.asarray(PEER["inputs"]))
  decode = jax.jit(mechanism.decode)
  state, outs = jnp.asarray(GIVEN["initial_state"]), []
  for begin, end in ((0, 17), *((t, t + 1) for t in range(17, 71))):
    now = [x[:, begin:end] for x in QKV]
    gates = {name: x[:, begin:end] for name, x in read.items()}
    out, state = decode(variables, state, *now, **gates)
    outs.append(out)
  assert_equal(np.concatenate(outs, axis=1), PEER["out"])
  assert_equal(state, PEER["state"])
  # `apply` begins with no state.
  given = {**GIVEN, "initial_state": None}
  expected = definitions.delta_rule_attention(**given)
  out = mechanism.apply(variables, *QKV, is_causal=True, **read)
  assert_equal(out, expected)


def test_comba_by_hand():
  """S ← S(α − β̃ k kᵀ) + β v kᵀ of four positions, the last a new segment.

  S₁ = 2 k₁                                               (2, 0)
  S₂ = (½ − ½·½) 2 k₁ + ½·4 k₁                            (2.5, 0)
  S₃ = 0·S₂ − ½·½ (S₂·k₃) k₃ + ½·4 k₃, S₂·k₃ = 1.5        1.625 (0.6, 0.8)
  S₄ = ½·4 k₄                                             (0, 2)
  """
  key = np.array([[1, 0], [1, 0], [0.6, 0.8], [0, 1]], np.float32)
  given = {
    "query": np.ones((1, 4, 1, 2), np.float32),
    "key": key[None, :, None],
    "value": np.array([2, 4, 4, 4], np.float32).reshape(1, 4, 1, 1),
    "erase_key": 0.5 * key[None, :, None],
    "beta": np.array([1, 0.5, 0.5, 0.5], np.float32).reshape(1, 4, 1),
    "log_decay": np.log([0.5, 0.5, 1, 1], dtype=np.float32).reshape(1, 4, 1),
    "segment_ids": np.array([[0, 0, 0, 1]]),
  }

  @jax.jit
  def with_gradients(given):
    def call(x):
      out = delta_rule_attention(**{**given, **x}, scale=1.0)
      return jnp.sum(out**2), out

    moved = {name: given[name] for name in ("key", "erase_key", "log_decay")}
    gradients, out = jax.grad(call, has_aux=True)(moved)
    return out, gradients

  for low in (-1000.0, -1e30):
    given["log_decay"][0, 2] = low
    expected = np.array([2, 2.5, 1.625 * 1.4, 2]).reshape(1, 4, 1, 1)
    found = definitions.delta_rule_attention(**given, scale=1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    found, gradients = with_gradients(given)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert all(np.isfinite(x).all() for x in gradients.values())
