"""Rotary positions by their paper; frequencies for longer sequences are those of
transformers.
"""

import functools
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
from tests.refusals import assert_refused

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
  # 255 + 1 does not fit into the dtype of these positions.
  last = (
    rotary(x[:, :1], np.array([[255]], d), scaling=DYNAMIC) for d in ("u1", int)
  )
  np.testing.assert_array_equal(*last)
  longer = turn(20, DYNAMIC)
  assert np.abs(longer - turn(20, None)).max() > 0.1
  traced = jax.jit(lambda p: rotary(x, p, theta=90.0, scaling=DYNAMIC))
  np.testing.assert_allclose(traced(np.arange(20)[None]), longer, atol=1e-5)


def test_rotary_keeps_dtype_and_row_positions():
  x = np.asarray(normal((2, 1, 1, 8))[0]).astype(jnp.bfloat16)
  turn = jax.jit(rotary)
  got = turn(x, np.array([[3], [5]]))
  assert got.dtype == jnp.bfloat16
  np.testing.assert_array_equal(got[1:], turn(x[1:], np.array([[5]])))


def test_what_is_refused():
  both = {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}
  assert_refused(
    lambda **scaling: rotary_frequencies(8, 10000.0, scaling),
    {"rope_type": "longrope"},
    {"factor": 2.0},
    ("factor", {"rope_type": "linear"}),
    {"factor": 0, "rope_type": "linear"},
    {"factor": True, "rope_type": "linear"},
    {"beta_fast": 1.0, **LLAMA3},
    ("high_freq_factor", LLAMA3 | {"high_freq_factor": 1.0}),
    {"mscale": 1.0, **YARN},
    ("mscale", {"mscale_all_dim": 1.0, **YARN}),
    {"factor": math.inf, "rope_type": "linear"},
    {"truncate": 0, **YARN},
    ("attention_factor", YARN | both),
  )
  wrong = (
    ("features", 3),
    ("features", 0),
    *(("theta", x) for x in (0, np.nan, 1)),
  )
  assert_refused(
    lambda features=8, theta=1e4: rotary_frequencies(features, theta, YARN),
    *({name: x} for name, x in wrong),
  )
  row, position = np.ones((1, 1, 1, 8), np.float32), np.ones((1, 1), int)
  fractions = ({"fraction": x} for x in (2.0, -0.5, 0, np.nan))
  turn = functools.partial(rotary, row, position)
  assert_refused(turn, *fractions, ("inputs", {"fraction": 0.1}))
  plain = functools.partial(rotary_frequencies, 8)
  assert_refused(plain, {"theta": 0.0}, {"theta": -1.0})
  with pytest.raises(ValueError, match=r"^features: 'dynamic' needs at least"):
    rotary_frequencies(2, 9.0, DYNAMIC)
  # The least that is accepted; θ^(−2/4) of 2⁻⁴ for a length up to L.
  np.testing.assert_allclose(rotary_frequencies(2)[0], [1.0])
  np.testing.assert_allclose(
    rotary_frequencies(4, 16.0, DYNAMIC, length=8)[0], [1.0, 0.25]
  )


@pytest.mark.parametrize(
  ("changed", "ramp"),
  [
    # Pair 8 · ln(64 / 2πr) / (2 · ln 10⁴) is −0.5 for r = 32 and 1.01 for 1, so
    # the ramp is from 0 to 2; a factor below 1 has no temperature.
    ({"factor": 0.5}, [0, 0.5, 1, 1]),
    # The last pair is at most the number of features less 1.
    ({"factor": 1.0, "beta_slow": 1e-9}, [0, 1 / 7, 2 / 7, 3 / 7]),
    # Both ends are at 0 where no pair rotates once.
    ({"factor": 1.0, "original_max_position_embeddings": 2}, [0, 1, 1, 1]),
  ],
)
def test_ends_of_yarns_ramp(changed, ramp):
  for factor in (changed["factor"], 4.0):
    scaling = YARN | changed | {"factor": factor}
    frequencies, temperature = rotary_frequencies(8, 1e4, scaling)
    expected = 10.0 ** -np.arange(4) * (1 - np.array(ramp) * (1 - 1 / factor))
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert temperature == 1.0 + 0.1 * max(math.log(factor), 0.0)


def test_rotary_computes_in_the_dtype_of_wide_inputs():
  with jax.enable_x64(True):
    x = jnp.full((1, 1, 1, 2), 1 / 3, jnp.float64)
    np.testing.assert_array_equal(rotary(x, np.array([[0]])), x)


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


def test_inputs_and_positions_that_do_not_fit(unchecked):
  call = {"inputs": X, "positions": np.arange(8)[None]}
  for run in (rotary, lambda x, p: jax.eval_shape(lambda x: rotary(x, p), x)):
    assert_refused(
      lambda run=run, **change: run(*(call | change).values()),
      {"positions": np.arange(8)},
      {"positions": np.arange(5)[None]},
      {"positions": np.zeros((3, 8), int)},
      {"positions": list(range(8))},
      {"positions": jnp.arange(8.0)[None]},
      {"positions": jnp.zeros((2, 8), jnp.bfloat16)},
      {"positions": jnp.zeros((2, 8), bool)},
      {"inputs": X[0]},
      {"inputs": X[..., :3]},
      {"inputs": X.astype(int)},
    )


def test_sizes_of_positions_that_do_not_fit(unchecked):
  for call, name, *arguments in (
    (sines, "positions", jnp.zeros((1, 3), jnp.bfloat16), np.ones(2)),
    (sines, "positions", np.arange(3), np.ones(2)),
    (alibi_slopes, "num_heads", 0),
    (alibi_bias, "num_heads", 2.5, 3),
    (alibi_bias, "max_length", 2, 3.0),
    (t5_buckets, "max_distance", 16.5),
    (functools.partial(t5_buckets, num_buckets=8.0), "num_buckets", 16),
    (functools.partial(t5_buckets, is_causal="no"), "is_causal", 16),
    (t5_bias, "embedding", jnp.ones(8)),
  ):
    assert_refused(functools.partial(call, *arguments), (name, {}))
