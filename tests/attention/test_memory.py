"""What promises less than T×S holds less, forward and backward.

Nothing runs: XLA tells what a compiled program reserves beside its arguments
and results.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys
from attention import mechanism as mechanisms
from tests.attention.forms import DERIVED, kinds_first

LENGTHS = (2048, 8192)
# Causal queries are split into parts of 1024, into 4 at most, and each part has loops
# of its own: 2 parts at 2048, and 4, as at any greater length, from 4096.
LENGTHS_OF = {"dsa": (4096, 16384)}
HEADS, HEAD_DIM = 2, 16
# Of `window_linear`, no length without a window is a whole number of chunks, so
# that all programs have a last step that moves back.
OPTIONS = {
  "sliding_window": {"window": 64},
  "window_linear": {"window": 33},
  # A quarter of the keys would be few enough for another program.
  "strided_2d": {"stride": 1},
}


def compiled(name, length, *, backward):
  """The program of one call; the backward also has a mask and causality."""
  mechanism = gates_from_keys(ATTENTIONS[name](**OPTIONS.get(name, {})))
  dims = Dims(HEADS, 1, HEAD_DIM, length, HEAD_DIM)
  variables = jax.eval_shape(
    lambda key: mechanism.init(key, dims), jax.random.key(0)
  )

  def array(heads):
    return jax.ShapeDtypeStruct((1, length, heads, HEAD_DIM), jnp.float32)

  qkv = [array(HEADS), array(1), array(1)]
  if "shared_qk" in mechanism.supports:
    qkv[1] = None
  mask = jax.ShapeDtypeStruct((1, 1, 1, length), bool)

  def forward(variables, qkv):
    is_causal = mechanisms.directions(mechanism)[0]
    return mechanism.apply(variables, *qkv, is_causal=is_causal)

  def with_gradients(variables, qkv, mask, cotangent):
    call = {"mask": mask, "is_causal": "causal" in mechanism.supports}
    out, pullback = jax.vjp(
      lambda qkv: mechanism.apply(variables, *qkv, **call), qkv
    )
    return out, pullback(cotangent)

  if backward:
    return jax.jit(with_gradients).lower(variables, qkv, mask, qkv[0]).compile()
  return jax.jit(forward).lower(variables, qkv).compile()


@functools.cache
def measured(name, length, *, backward):
  """Temporary bytes and instructions of a program, which must be less than T×S."""
  program = compiled(name, length, backward=backward)
  temporary = program.memory_analysis().temp_size_in_bytes
  if length >= LENGTHS[-1]:
    # Of the logits of all pairs; dense attention holds whole rows of a block.
    share = 1 / 4 if name == "dense" else 1 / 8
    assert temporary < share * HEADS * length**2 * 4
  return temporary, program.as_text().count(" = ")


# By another's code, or by a test of their own file.
_COVERED = {*DERIVED, "multiplicative", "window_2d", "dsa"}


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[pytest.mark.thorough] * (name in _COVERED))
    for name in ATTENTIONS
  ],
)
def test_memory_is_a_share_of_all_pairs(name):
  measured(name, LENGTHS[-1], backward=True)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", kinds_first(ATTENTIONS, "kimi_delta"))
def test_memory_is_linear_in_length(name, backward):
  lengths = LENGTHS_OF.get(name, LENGTHS)
  found = [measured(name, T, backward=backward) for T in lengths]
  temps, instructions = zip(*found, strict=True)
  assert temps[1] <= 4.2 * temps[0], temps
  # And the program is the same one, whatever the length, once it has a loop.
  assert instructions[1] <= 1.1 * instructions[0], instructions


def test_the_measure_sees_a_whole_matrix_grow(monkeypatch):
  module = importlib.import_module("attention.dense")
  monkeypatch.setattr(module, "_ONE_BLOCK", LENGTHS[-1])
  temps = [
    compiled("dense", T, backward=True).memory_analysis().temp_size_in_bytes
    for T in LENGTHS
  ]
  assert temps[1] > 15 * temps[0], temps
