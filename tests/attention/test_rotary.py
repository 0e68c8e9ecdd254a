"""Rotary positions by their paper; frequencies for longer sequences are those of
transformers.
"""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import (
  alibi_bias,
  alibi_slopes,
  rotary,
  rotary_frequencies,
  t5_bias,
  t5_buckets,
)
from attention.platform import backend
from attention.positions import sines
from tests.attention.calls import normal

_VALUES = sorted((pathlib.Path(__file__).parent / "rotary").glob("*.json"))
LLAMA3 = {
  "rope_type": "llama3",
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  "original_max_position_embeddings": 8192,
}
YARN = {
  "rope_type": "yarn",
  "factor": 4.0,
  "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 8}


@pytest.mark.parametrize("path", _VALUES, ids=lambda path: path.stem)
def test_frequencies_are_those_of_transformers(path):
  cases = json.loads(path.read_text())
  assert len(cases) == 11
  for case in cases:
    frequencies, factor = rotary_frequencies(
      *case["arguments"], length=case["length"]
    )
    assert frequencies.dtype == np.float32
    # Theirs are computed in float32.
    np.testing.assert_allclose(frequencies, case["frequencies"], rtol=1e-6)
    np.testing.assert_allclose(factor, case["factor"], rtol=1e-12)


def test_llama3_by_hand():
  """Pairs that turn more than 4 times in 8,192 positions stay, others slow down."""
  frequencies, factor = rotary_frequencies(4, 1e6, LLAMA3)
  turns = 8192 * 1e-3 / (2 * math.pi)
  share = (turns - 1.0) / 3.0
  expected = (1.0 - share) * 1e-3 / 8.0 + share * 1e-3
  np.testing.assert_allclose(frequencies, [1.0, expected], rtol=1e-6)
  assert factor == 1.0


def test_rotary_turns_by_them():
  """The angle of pair i at p is p · ω_i, and YaRN's factor multiplies."""
  x = np.random.default_rng(0).standard_normal((1, 3, 2, 8), np.float32)
  positions = np.array([[0, 5, 90]])
  frequencies, factor = rotary_frequencies(8, 50.0, YARN)
  assert factor == pytest.approx(1.0 + 0.1 * math.log(4.0))
  turned = (x[..., :4] + 1j * x[..., 4:]) * np.exp(
    1j * positions[0][:, None, None] * frequencies.astype(float)
  )
  got = rotary(jnp.asarray(x), positions, theta=50.0, scaling=YARN)
  expected = factor * np.concatenate([turned.real, turned.imag], -1)
  np.testing.assert_allclose(got, expected, atol=2e-5)


def test_dynamic_depends_on_the_longest_position():
  """Within the trained length it is the default; traced or not, it is the same."""
  x = np.ones((1, 20, 1, 8), np.float32)

  def turn(n, scaling):
    options = {"theta": 90.0, "scaling": scaling}
    return jax.jit(lambda x: rotary(x, np.arange(n)[None], **options))(x[:, :n])

  np.testing.assert_array_equal(turn(8, DYNAMIC), turn(8, None))
  longer = turn(20, DYNAMIC)
  assert np.abs(longer - turn(20, None)).max() > 0.1
  traced = jax.jit(lambda p: rotary(x, p, theta=90.0, scaling=DYNAMIC))
  np.testing.assert_allclose(traced(np.arange(20)[None]), longer, atol=1e-5)


def test_rotary_is_su():
  """R_p x with block-diagonal R of 2×2 rotations, on the paper's pairs."""
  length, head_dim = 40, 8
  x = np.random.default_rng(0).normal(size=(2, length, 3, head_dim))
  # Feature i of ours is feature 2i of the paper's, and i + H/2 is 2i + 1.
  paper = np.arange(head_dim).reshape(-1, 2).T.reshape(-1)
  expected = np.zeros_like(x)
  for p in range(length):
    rotation = np.zeros((head_dim, head_dim))
    for i in range(head_dim // 2):
      angle = p * 10000.0 ** (-2 * i / head_dim)
      c, s = np.cos(angle), np.sin(angle)
      rotation[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = [[c, -s], [s, c]]
    expected[:, p] = x[:, p] @ rotation.T
  turn = jax.jit(rotary)
  got = turn(np.float32(x[..., paper]), np.arange(length)[None])
  np.testing.assert_allclose(got, expected[..., paper], atol=1e-5)
  # Queries and keys see their distance only.
  one, other = np.asarray(normal((2, 1, 1, 1, head_dim))[0])

  def product(t, s):
    return np.sum(turn(one, np.array([[t]])) * turn(other, np.array([[s]])))

  np.testing.assert_allclose(product(7, 3), product(27, 23), atol=1e-5)
  assert abs(product(7, 3) - product(7, 4)) > 1e-3


def test_rotary_keeps_dtype_and_row_positions():
  x = np.asarray(normal((2, 1, 1, 8))[0]).astype(jnp.bfloat16)
  turn = jax.jit(rotary)
  got = turn(x, np.array([[3], [5]]))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got[1:], turn(x[1:], np.array([[5]])))


def test_rotary_needs_pairs():
  with pytest.raises(ValueError, match=r"^inputs: expected an even number"):
    rotary(jnp.ones((1, 2, 1, 3)), np.arange(2)[None])


@pytest.mark.parametrize(
  ("scaling", "message"),
  [
    ({"rope_type": "longrope"}, "rope_type: expected one of default, linear"),
    ({"factor": 2.0}, "factor: 'default' has no option, got 2.0"),
    ({"rope_type": "linear"}, "factor: missing; 'linear' needs it"),
    ({"rope_type": "linear", "factor": 0}, "factor: expected a number above 0"),
    ({"rope_type": "linear", "factor": True}, "factor: expected a number abov"),
    (LLAMA3 | {"beta_fast": 1.0}, "beta_fast: 'llama3' has factor, low_freq"),
    (LLAMA3 | {"high_freq_factor": 1.0}, "high_freq_factor: expected above"),
    (YARN | {"mscale": 1.0}, "mscale: expected it and mscale_all_dim"),
    (YARN | {"truncate": 0}, "truncate: expected true or false"),
    (
      YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0},
      "attention_factor: expected it or mscale, got both",
    ),
  ],
)
def test_what_is_refused(scaling, message):
  with pytest.raises(ValueError, match=f"^{message}") as info:
    rotary_frequencies(8, 10000.0, scaling)
  assert "\n" not in str(info.value)


def test_a_program_for_accelerators_has_no_table_of_angles():
  """Of positions in NumPy; on a CPU it has, and the same numbers come out."""
  (x,), positions = normal((1, 2048, 2, 8)), np.arange(2048)[None]

  def traced(name):
    with backend.tracing_for(name):
      return jax.make_jaxpr(lambda x: rotary(x, positions))(x)

  found = {name: traced(name) for name in ("cpu", "gpu", "tpu")}
  largest = {
    name: max(np.size(constant) for constant in jaxpr.consts)
    for name, jaxpr in found.items()
  }
  assert largest == {"cpu": 2048 * 4, "gpu": 2048, "tpu": 2048}
  cpu, gpu = (
    jax.core.eval_jaxpr(found[name].jaxpr, found[name].consts, x)[0]
    for name in ("cpu", "gpu")
  )
  np.testing.assert_allclose(gpu, cpu, atol=1e-5)


X = jnp.ones((2, 8, 4, 6))


@pytest.mark.parametrize(
  ("inputs", "positions", "message"),
  [
    (X, np.arange(8), r"positions: .*got int64 \(8,\); give positions\[None\]"),
    (
      X,
      np.arange(5)[None],
      r"positions: .* inputs \[2, 8, …\], got int64 \(1, 5",
    ),
    (X, np.zeros((3, 8), int), r"positions: .*, got int64 \(3, 8\)"),
    (X, list(range(8)), "positions: .*, got list; np.asarray"),
    (
      X,
      jnp.arange(8.0)[None],
      r"positions: expected integers .* float32 \(1, 8",
    ),
    (X, jnp.zeros((2, 8), jnp.bfloat16), "positions: .*, got bfloat16"),
    (X, jnp.zeros((2, 8), bool), "positions: .*, got bool"),
    (X[0], np.arange(8)[None], r"inputs: expected 4 axes \[B, T, N, H\]"),
    (X.astype(int), np.arange(8)[None], "inputs: expected a float dtype"),
  ],
)
def test_inputs_and_positions_that_do_not_fit(
  inputs, positions, message, unchecked
):
  for run in (rotary, lambda x, p: jax.eval_shape(lambda x: rotary(x, p), x)):
    with pytest.raises(ValueError, match=f"^{message}"):
      run(inputs, positions)


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (lambda: sines(jnp.zeros((1, 3), jnp.bfloat16), np.ones(2)), "positions"),
    (lambda: sines(np.arange(3), np.ones(2)), "positions"),
    (lambda: alibi_slopes(0), "num_heads"),
    (lambda: alibi_bias(2.5, 3), "num_heads"),
    (lambda: alibi_bias(2, 3.0), "max_length"),
    (lambda: t5_buckets(16.5), "max_distance"),
    (lambda: t5_buckets(16, num_buckets=8.0), "num_buckets"),
    (lambda: t5_buckets(16, is_causal="no"), "is_causal"),
    (lambda: t5_bias(jnp.ones(8)), "embedding"),
  ],
)
def test_sizes_of_positions_that_do_not_fit(function, message, unchecked):
  with pytest.raises(ValueError, match=f"^{message}: expected"):
    function()
