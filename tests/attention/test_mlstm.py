"""mLSTM with input gates beyond float32; test_recurrences.py has its values."""

import numpy as np

from attention import mlstm_attention
from attention.testing import assert_close
from tests.attention.state_cases import mlstm_arrays


def test_an_input_gate_beyond_float32_overflows_nothing():
  """Equal gates of e^500 weigh as equal gates of e^20."""
  arrays = mlstm_arrays(9)
  del arrays["initial_state"]
  arrays["log_decay"] *= 0.0
  outs = []
  for size in (20.0, 500.0):
    arrays["log_input"] = np.full_like(arrays["log_input"], size)
    outs.append(mlstm_attention(**arrays))
  assert_close(outs[1], outs[0], 1e-5)
