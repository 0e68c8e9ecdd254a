"""Comba decodes as its authors' function computes, and as by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from attention import comba, definitions, delta_rule_attention
from tests.verification.peers import agreement, vectors


def test_comba_decodes_as_its_authors():
  """A prompt of 13 positions, and then one by one; the cache is the state."""
  (case,) = [x for x in vectors.read() if x.name == "comba_gates"]
  params, given = agreement.split_params(case.given)
  mechanism, variables = comba(), {"params": params}
  read = mechanism.gates(variables, jnp.asarray(given.pop("inputs")))
  assert read["log_decay"].min() < -29.0
  decode = jax.jit(mechanism.decode)
  outs, length = [], case.given["query"].shape[1]

  def rows(begin, end):
    qkv = [given[name][:, begin:end] for name in agreement.QKV]
    return qkv, {name: x[:, begin:end] for name, x in read.items()}

  qkv, gates = rows(0, 13)
  lengths, state = jnp.array([13]), jnp.zeros((1, 2, 4, 3))
  state = mechanism.prefill(variables, state, *qkv, lengths, **gates)
  for t in range(13, length):
    qkv, gates = rows(t, t + 1)
    out, state = decode(variables, state, *qkv, **gates)
    outs.append(out)
  found = np.concatenate(outs, axis=1)
  assert agreement.difference(found, case.result["out"][:, 13:]) < 2e-5


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
