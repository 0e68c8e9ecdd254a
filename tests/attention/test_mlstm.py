"""mLSTM: its states, segments, the running maximum, and ε."""

import functools

import jax
import numpy as np
import pytest

from attention import MlstmState, definitions, mlstm_attention
from attention.platform import backend
from tests.attention.calls import assert_close

B, N, K, H, V = 2, 4, 2, 5, 3


def drawn(length):
  """The arrays of a call, some of whose gates are far from 0."""
  rng = np.random.default_rng(0)
  normal = rng.standard_normal
  log_input = 3.0 * normal((B, length, N))
  log_input[:, 3::11] = 60.0
  log_decay = -np.exp(2.0 * normal((B, length, N)))
  log_decay[:, ::13] = -300.0
  state = normal((B, N, H, V)), normal((B, N, H)), 5.0 * normal((B, N))
  arrays = {
    "query": normal((B, length, N, H)),
    "key": normal((B, length, K, H)),
    "value": normal((B, length, K, V)),
    "log_decay": log_decay,
    "log_input": log_input,
    "initial_state": MlstmState(*state),
  }
  return jax.tree.map(lambda x: x.astype(np.float32), arrays)


@pytest.mark.parametrize("where", ["cpu", "gpu"])
@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_results_and_states_are_the_definition_s(epsilon, where):
  length, rng = 150, np.random.default_rng(1)
  arrays = drawn(length)
  call = {
    "mask": rng.random((B, 1, 1, length)) < 0.8,
    "segment_ids": np.sort(rng.integers(0, 4, (B, length))),
    "scale": 0.7,
    "epsilon": epsilon,
    "return_state": True,
  }
  out, state = definitions.mlstm_attention(**arrays, **call)
  with backend.tracing_for(where):
    function = functools.partial(mlstm_attention.__wrapped__, **call)
    found, last = jax.jit(function)(**arrays)
  assert_close(found, out, 1e-5)
  for x, y in zip(last, state, strict=True):
    assert_close(x, y, 1e-5)


def test_a_call_goes_on_from_a_state():
  arrays, cut = drawn(97), 41
  run = functools.partial(mlstm_attention, return_state=True)
  expected = run(**arrays)
  state, outs = arrays.pop("initial_state"), []
  for part in (slice(cut), slice(cut, None)):
    given = {n: x[:, part] for n, x in arrays.items()}
    out, state = run(**given, initial_state=state)
    outs.append(out)
  assert_close(np.concatenate(outs, axis=1), expected[0], 1e-5)
  for x, y in zip(state, expected[1], strict=True):
    assert_close(x, y, 1e-5)


def test_an_input_gate_beyond_float32_overflows_nothing():
  """Equal gates of e^500 weigh as equal gates of e^20."""
  arrays = drawn(9)
  del arrays["initial_state"]
  arrays["log_decay"] *= 0.0
  outs = []
  for size in (20.0, 500.0):
    arrays["log_input"] = np.full_like(arrays["log_input"], size)
    outs.append(mlstm_attention(**arrays))
  assert_close(outs[1], outs[0], 1e-5)


def test_a_state_of_another_shape_is_refused():
  arrays = drawn(3)
  state = arrays.pop("initial_state")
  wrong = state._replace(maximum=state.maximum[..., None])
  with pytest.raises(ValueError, match=r"^initial_state: expected an MlstmSta"):
    mlstm_attention(**arrays, initial_state=wrong)
