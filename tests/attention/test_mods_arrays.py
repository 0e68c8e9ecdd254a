"""What a score_mod closes over reaches it in its own order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import definitions, dense_attention, flash_attention
from attention.testing import assert_close
from tests.attention.calls import draw


@pytest.mark.parametrize("function", [dense_attention, flash_attention])
def test_arrays_of_several_dtypes_keep_their_order(function):
  """Integers before two floats, which have gradients and so are moved ahead."""
  rng, length = np.random.default_rng(0), 7
  kinds = rng.integers(0, 3, length)
  levels, slopes = rng.normal(size=(2, length))

  def score_mod(arrays, score, b, n, t, s):
    del b, n
    kinds, levels, slopes = arrays
    return levels[kinds[s]] + score * slopes[t]

  def run(arrays, *qkv):
    return function(*qkv, score_mod=partial(score_mod, arrays))

  arrays = (jnp.asarray(kinds), *jnp.float32((levels, slopes)))
  qkv = draw(length)
  expected = definitions.dense_attention(
    *qkv, score_mod=partial(score_mod, (kinds, levels, slopes))
  )
  assert_close(jax.jit(run)(arrays, *qkv), expected, 1e-5)
