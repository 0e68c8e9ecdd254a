"""Log-linear attention is a binary counter of states."""

import numpy as np

from attention import definitions, gated_linear_attention, log_linear_attention
from attention.log_linear import LevelState
from tests.attention import state_cases as cases
from tests.attention.state_cases import BATCH


def test_one_call_goes_on_from_another():
  """Also where the examples of a batch are at different positions."""
  arrays = cases.of_log_linear(100)
  mask = np.ones((BATCH, 1, 1, 37), bool)
  mask[1, ..., 20:] = False
  run = cases.compiled(log_linear_attention)
  whole, last = run(arrays)
  # Copies: a program that still runs reads the arrays themselves.
  first, second = (
    {
      name: x if name == "initial_state" else x[:, part].copy()
      for name, x in arrays.items()
    }
    for part in (slice(0, 37), slice(37, None))
  )
  for name in second.keys() - {"initial_state"}:
    second[name][1, :46] = arrays[name][1, 20:66]
  before, state = run(first | {"mask": mask})
  np.testing.assert_array_equal(state.count, [42, 90])
  np.testing.assert_allclose(before[0], whole[0, :37], atol=3e-6)
  assert not np.any(before[1, 20:])
  after, found = run(second | {"initial_state": state})
  np.testing.assert_allclose(after[0], whole[0, 37:], atol=3e-6)
  np.testing.assert_allclose(after[1, :46], whole[1, 20:66], atol=3e-6)
  np.testing.assert_allclose(found.sums[0], last.sums[0], atol=3e-6)
  np.testing.assert_array_equal(found.count, [105, 153])


def test_known_special_cases():
  """Scales of 1 are gated linear attention; too few levels share the last."""
  arrays = cases.of_log_linear(200)
  del arrays["initial_state"]
  arrays["level_scales"][:] = 1.0
  found, state = cases.compiled(log_linear_attention)(arrays)
  arrays.pop("level_scales")
  expected, last = cases.compiled(gated_linear_attention)(arrays)
  np.testing.assert_allclose(found, expected, atol=3e-6)
  np.testing.assert_allclose(np.sum(state.sums, axis=2), last, atol=3e-6)
  arrays = cases.of_log_linear(16)
  sums, count = arrays["initial_state"]
  arrays["level_scales"] = arrays["level_scales"][..., :5]
  arrays["initial_state"] = LevelState(sums[:, :, :4], count + 40)
  found = cases.compiled(log_linear_attention)(arrays)
  expected = definitions.log_linear_attention(**arrays, return_state=True)
  cases.assert_values(found, expected, 5e-6)
