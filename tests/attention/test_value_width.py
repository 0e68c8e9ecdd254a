"""Caches keep values of any width, as `Dims.value_dim` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention.testing import Case, assert_close
from tests.attention.mechanisms import ONE_EACH

CASE = Case(length=9, value_dim=5)
DIMS = CASE.dims._replace(value_dim=CASE.value_dim)


@pytest.mark.parametrize(
  "mechanism",
  [m for m in ONE_EACH if "decode" in m.supports],
  ids=lambda mechanism: mechanism.name,
)
def test_decoding_is_the_causal_call(mechanism):
  """From an empty cache, and from a prompt of five positions."""
  arrays, _ = mechanism.draw(CASE, cached=True)
  arrays = [jnp.asarray(x) for x in arrays]
  record = mechanism.record
  variables = mechanism.variables(DIMS)
  expected = mechanism.define(variables, arrays, is_causal=True)
  assert expected.shape[3] == 5
  empty = record.init_cache(variables, CASE.batch, 9, DIMS, jnp.float32)
  decode = jax.jit(mechanism.decode)
  started = [(0, empty)]
  if record.prefill is not None:
    prompt = [x[:, :5] for x in arrays]
    lengths = jnp.full((CASE.batch,), 5)
    prefill = jax.jit(mechanism.prefill)
    started.append((5, prefill(variables, empty, prompt, lengths)))
  for first, cache in started:
    outs = []
    for t in range(first, 9):
      out, cache = decode(variables, cache, [x[:, t : t + 1] for x in arrays])
      outs.append(out)
    found = np.concatenate(outs, axis=1)
    assert_close(found, expected[:, first:], 1e-5, f"from position {first}")
