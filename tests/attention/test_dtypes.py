"""Arrays of several dtypes are computed as jnp promotes them."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention.testing.calls import Case
from attention.testing.mechanism import forward
from tests.attention.forms import DERIVED
from tests.attention.mechanisms import ONE_EACH

HALF = jnp.bfloat16


@pytest.mark.parametrize(
  "mechanism",
  [
    pytest.param(m, marks=[pytest.mark.thorough] * (m.name in DERIVED))
    for m in ONE_EACH
    # Keys that are made of inputs have the dtype of these.
    if "own_keys" not in m.supports
  ],
  ids=str,
)
def test_arrays_of_several_dtypes_are_promoted(mechanism):
  """So that no digit of the wider one is lost but in the result's own dtype."""
  case = Case(("mask",))
  qkv, call = mechanism.draw(case)
  is_causal = mechanism.directions[-1]
  run, flags = (
    forward(mechanism, is_causal),
    {"is_causal": True} if is_causal else {},
  )
  half = [x.astype(HALF) for x in qkv]
  for mixed in [qkv[0], *half[1:]], [half[0], *qkv[1:]]:
    got = run(mixed, **call)
    assert got.dtype == mixed[0].dtype
    wide = [np.asarray(x, np.float32) for x in mixed]
    variables = mechanism.variables(case.dims)
    expected = mechanism.define(variables, wide, **call, **flags)
    error = np.abs(np.float32(got) - expected).max()
    rounding = 2**-8 if got.dtype == HALF else 1e-5
    assert error <= rounding * np.abs(expected).max()
