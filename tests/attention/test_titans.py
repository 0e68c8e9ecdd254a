"""Titans' neural memory: sizes of mini-batches, and its special cases."""

import jax
import numpy as np
import pytest

from attention import (
  definitions,
  delta_rule_attention,
  titans,
  titans_attention,
)
from attention.mechanism import Dims
from attention.testing import assert_close
from tests.attention import state_cases as cases
from tests.attention.state_cases import HEADS, KV_HEADS


@pytest.mark.parametrize("size", [1, 64, 100])
def test_mini_batches_of_one_position_and_longer_than_a_chunk(size):
  arrays, more = cases.titans_arrays(150), cases.options(150)
  del arrays["initial_state"]
  arrays |= more
  run = cases.jit_with_state(titans_attention, minibatch_size=size)
  call = {"minibatch_size": size, "return_state": True}
  expected = definitions.titans_attention(**arrays, **call)
  found = run(arrays)
  cases.assert_values(found, expected, 5e-6)


def test_without_momentum_it_is_the_gated_delta_rule():
  """With mini-batches of one position: β = 2θ, and the value is read undecayed."""
  arrays = cases.titans_arrays(150)
  del arrays["initial_state"]
  arrays["log_momentum"] = np.full_like(arrays["log_momentum"], -1e4)
  found = titans_attention(**arrays, minibatch_size=1)
  rate, decay = arrays.pop("learning_rate"), arrays["log_decay"]
  del arrays["log_momentum"]
  key = np.repeat(arrays["key"], HEADS // KV_HEADS, axis=2)
  expected = delta_rule_attention(
    **arrays | {"key": key, "erase_key": key}, beta=2.0 * rate
  )
  assert decay.min() < -1.0
  assert_close(found, expected, 1e-6)


def test_a_new_layer_forgets_little():
  """Without inputs, a gate is the sigmoid of its bias: of 0, 0 and 4."""
  mechanism, dims = titans(max_rate=0.3), Dims(2, 2, 4, 9, 6)
  variables = mechanism.init(jax.random.key(0), dims)
  gates = mechanism.gates(variables, np.zeros((1, 3, 6), np.float32))
  # The logarithms of 1/2 and of 1/(1 + e^-4).
  expected = {"learning_rate": 0.15, "log_momentum": -0.693147}
  expected["log_decay"] = -0.0181499
  assert gates.keys() == expected.keys()
  for name, x in gates.items():
    np.testing.assert_allclose(x, np.full((1, 3, 2), expected[name]), rtol=1e-5)
