"""The caller may choose the size of a block, and no number depends on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys, plug
from attention.testing import assert_close
from tests.attention.forms import RECURRENT, SIZES, kinds_first

# A block or chunk of these is part of what they compute.
OWN = ("bigbird", "lsh", "moba", "nsa")
NAMES = [name for name in ATTENTIONS if name not in (*OWN, *RECURRENT)]


def attend(name, **call):
  dims = Dims(4, 2, 8, 23, 16)
  mechanism = gates_from_keys(ATTENTIONS[name](**SIZES[name]))
  variables = mechanism.init(jax.random.key(0), dims)
  rng = np.random.default_rng(0)
  query, key, value = (
    jnp.asarray(rng.standard_normal((2, 23, n, 8)), jnp.float32)
    for n in (4, 2, 2)
  )
  mask = jnp.asarray(rng.random((2, 1, 1, 23)) < 0.8)
  call["is_causal"] = plug.directions(mechanism)[0]
  return jax.jit(
    lambda *qkv: mechanism.apply(variables, *qkv, mask=mask, **call)
  )(query, key, value)


expected = functools.cache(attend)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_size_gives_the_same_numbers(name):
  assert_close(attend(name, block_size=8), expected(name), 1e-5)


@pytest.mark.parametrize("name", kinds_first(NAMES))
def test_any_block_size_gives_the_same_numbers(name):
  for block_size in (1, 100):
    assert_close(attend(name, block_size=block_size), expected(name), 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_block_size_raises(name, unchecked):
  for block_size in (0, -1, 2.5, True):
    with pytest.raises(ValueError, match=r"^block_size: "):
      attend(name, block_size=block_size)
