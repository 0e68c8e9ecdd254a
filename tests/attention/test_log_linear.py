"""Log-linear attention is a binary counter of states."""

import numpy as np

from attention import definitions, gated_linear_attention, log_linear_attention
from attention.log_linear import LevelState
from tests.attention import state_cases as cases


def test_known_special_cases():
  """Scales of 1 are gated linear attention; too few levels share the last."""
  arrays = cases.log_linear_arrays(200)
  del arrays["initial_state"]
  arrays["level_scales"][:] = 1.0
  found, state = cases.jit_with_state(log_linear_attention)(arrays)
  arrays.pop("level_scales")
  expected, last = cases.jit_with_state(gated_linear_attention)(arrays)
  np.testing.assert_allclose(found, expected, atol=3e-6)
  np.testing.assert_allclose(np.sum(state.sums, axis=2), last, atol=3e-6)
  arrays = cases.log_linear_arrays(16)
  sums, count = arrays["initial_state"]
  arrays["level_scales"] = arrays["level_scales"][..., :5]
  arrays["initial_state"] = LevelState(sums[:, :, :4], count + 40)
  found = cases.jit_with_state(log_linear_attention)(arrays)
  expected = definitions.log_linear_attention(**arrays, return_state=True)
  cases.assert_values(found, expected, 5e-6)
