"""Arrays of several dtypes are computed as jnp promotes them."""

import jax.numpy as jnp
import numpy as np
import pytest

from attention.testing.calls import Case
from attention.testing.mechanism import forward
from tests.attention.mechanisms import ONE_EACH

HALF = jnp.bfloat16


@pytest.mark.parametrize(
  "mechanism",
  # Keys that are made of inputs have the dtype of these.
  [m for m in ONE_EACH if "own_keys" not in m.supports],
  ids=str,
)
def test_arrays_of_several_dtypes_are_promoted(mechanism):
  """So that no digit of the wider one is lost but in the result's own dtype."""
  qkv, call = mechanism.draw(Case(("mask",)))
  run = forward(mechanism, mechanism.directions[-1])
  half = [jnp.asarray(x, HALF) for x in qkv]
  wide = [np.asarray(x.astype(jnp.float32)) for x in half]
  for mixed, whole in (
    ([qkv[0], *half[1:]], [qkv[0], *wide[1:]]),
    ([half[0], *qkv[1:]], [wide[0], *qkv[1:]]),
  ):
    got, expected = run(mixed, **call), run(whole, **call)
    assert got.dtype == mixed[0].dtype
    error = np.abs(np.float32(got) - np.float32(expected)).max()
    rounding = 2**-8 if got.dtype == HALF else 1e-5
    assert error <= rounding * np.abs(expected).max()
