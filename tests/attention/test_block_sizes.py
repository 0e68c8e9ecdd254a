"""The caller may choose the size of a block, and no number depends on it."""

import functools

import jax
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys
from attention import mechanism as mechanisms
from attention.testing import assert_close
from tests.attention.calls import draw, random_mask
from tests.attention.forms import KINDS, RECURRENT, SIZES

# A block or chunk of these is part of what they compute.
OWN = ("bigbird", "lsh", "moba", "nsa")
DIMS, QKV = Dims(4, 2, 8, 23, 16), draw(23)
MASK = random_mask(2, 1, 1, 23, share=0.8)
NAMES = [name for name in ATTENTIONS if name not in (*OWN, *RECURRENT)]


@functools.cache
def record(name):
  """A record and its variables."""
  mechanism = gates_from_keys(ATTENTIONS[name](**SIZES[name]))
  init = jax.jit(lambda key: mechanism.init(key, DIMS))
  return mechanism, init(jax.random.key(0))


def attend(name, **call):
  mechanism, variables = record(name)
  call |= {"is_causal": mechanisms.directions(mechanism)[0], "mask": MASK}
  return jax.jit(functools.partial(mechanism.apply, **call))(variables, *QKV)


@pytest.mark.parametrize("name", NAMES)
def test_a_block_size_gives_the_same_numbers(name):
  """One that divides no length; for one of each kind those at the ends as well."""
  expected = attend(name)
  for block_size in (8, 1, 100) if name in KINDS else (8,):
    assert_close(attend(name, block_size=block_size), expected, 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_block_size_raises(name, unchecked):
  for block_size in (0, -1, 2.5, True):
    with pytest.raises(ValueError, match=r"^block_size: "):
      attend(name, block_size=block_size)
