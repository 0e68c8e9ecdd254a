"""TTT-Linear: where its mini-batches start, and its initial model."""

import numpy as np
import pytest

from attention.testing import assert_close
from tests.attention import state_cases as cases

CASE = cases.CASES["ttt_linear"]


@pytest.mark.parametrize("length", [1, 5, 6, 77])
def test_without_a_state_mini_batches_are_aligned(length):
  """Neither mask nor segments nor a state: the other form of a step."""
  arrays = CASE.given(length)
  del arrays["initial_state"]
  found = cases.jit_with_state(CASE.function)(arrays)
  expected = CASE.definition(**arrays, return_state=True)
  cases.assert_values(found, expected, 5e-6)


def test_learning_rates_of_zero_leave_the_initial_model():
  arrays = CASE.given(9)
  del arrays["initial_state"]
  arrays["learning_rate"] = 0.0 * arrays["learning_rate"]
  out, state = CASE.function(**arrays, return_state=True)
  query = 0.8 * arrays["query"]
  z = np.einsum("btnh,nhv->btnv", query, arrays["initial_weights"])
  z += arrays["initial_bias"]
  z -= z.mean(-1, keepdims=True)
  z /= np.sqrt(np.mean(z**2, axis=-1, keepdims=True) + 1e-3)
  expected = query + arrays["norm_scale"] * z + arrays["norm_bias"]
  assert_close(out, expected, 1e-6)
  assert not np.any(state.change)
  assert not np.any(state.gradient)
