"""MesaNet solves its systems; test_recurrences.py has its values and gradients."""

import numpy as np

from attention import definitions, mesa_attention
from tests.attention import state_cases as cases


def test_the_error_falls_with_the_iterations():
  """One key a thousand times, and a small λ: the condition is 10⁵."""
  arrays = cases.mesa_arrays(300)
  arrays["key"][:, 5:] = arrays["key"][:, 5:6]
  arrays["beta"][:], arrays["log_decay"][:] = 1.0, 0.0
  arrays["regularizer"][:] = 3e-3
  expected = definitions.mesa_attention(**arrays)

  def error(count):
    out, _ = cases.jit_with_state(mesa_attention, num_iterations=count)(arrays)
    return np.abs(out - expected).max() / np.abs(expected).max()

  errors = [error(count) for count in (2, 8, 30)]
  assert errors[0] > 1e-2 > errors[1] > errors[2]
  assert errors[2] < 1e-4
