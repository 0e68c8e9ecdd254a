"""Elementwise recurrences: a segment's first position, and memory of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import mamba_attention, rg_lru_attention
from tests.attention import state_cases as cases

WIDE = {cases.DIM: 24, cases.VALUE: 24}
FUNCTIONS = {"mamba": mamba_attention, "rg_lru": rg_lru_attention}


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
    def total(arrays):
      return jnp.sum(jnp.sin(FUNCTIONS[name].__wrapped__(**arrays)))

    arrays = {
      n: jax.ShapeDtypeStruct([WIDE.get(s, s) for s in x.shape], x.dtype)
      for n, x in cases.CASES[name].given(length).items()
    }
    compiled = jax.jit(jax.grad(total)).lower(arrays).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  short, long = temporaries(1024), temporaries(4096)
  assert long < 4.4 * short
  if name == "mamba":
    states = cases.BATCH * 4096 * cases.HEADS * 24 * 24
    assert long < 0.25 * 4 * states
