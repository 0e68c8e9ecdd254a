"""Numbers in the prose of `attention/` and its documents are the code's."""

import ast
import inspect
import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import ATTENTIONS, Dims
from attention import mechanism as mechanisms
from attention.performer import _RELU_EPSILON
from attention.recurrent import features
from attention.recurrent.arrays import unit_length
from docs import draw_mechanisms

_ROOT = pathlib.Path(__file__).parent.parent.parent
_PAGE = (_ROOT / "docs" / "mechanisms.md").read_text()
_DEFAULTS = {
  name: mechanisms.example(make).sizes for name, make in ATTENTIONS.items()
}


def _only(pattern, text):
  """The one number that a pattern finds in a text, wherever lines end."""
  (found,) = re.findall(pattern, " ".join((text or "").split()))
  return float(found)


def test_normaliser_of_nothing():
  pattern = r"normaliser is under (\S+?),? (?:gets|counts)"
  text = attention.linear_attention.__doc__
  assert _only(pattern, text) == features._MIN_NORMALISER
  exponent = _only(r"normaliser is below 10⁻(\S+) gets", _in_digits(_PAGE))
  assert math.isclose(10**-exponent, features._MIN_NORMALISER)


def _in_digits(text):
  """The text with ordinary digits in place of superscripts."""
  return text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789"))


def test_normaliser_of_rows_out_of_range():
  assert _only(r"n_t < (\S+) up", features.__doc__) == features._MIN_ACCURATE


def test_epsilon_of_relu_features():
  text = attention.performer_attention.__doc__
  epsilon = _only(r"x̃/√M, 0\) \+ ([\d.]+),", text)
  assert epsilon == _RELU_EPSILON


def test_default_window_is_that_of_the_paper():
  keys = _only(r"the paper's (\d+) keys", attention.sliding_window.__doc__)
  assert _default(attention.sliding_window, "window") == keys / 2


def _default(function, option):
  return inspect.signature(function).parameters[option].default


def test_common_size_in_benchmarks():
  size = _only(
    r"at a common size: (\d+) keys", mechanisms.Hyperparameters.__doc__
  )
  timed = {name: s.timed(16_384) for name, s in _DEFAULTS.items()}
  # Its window is the side of a square of keys.
  assert timed.pop("window_2d")["window"] ** 2 == size
  for option in ("window", "num_features", "rank"):
    assert {x[option] for x in timed.values() if option in x} == {size}


def test_tokens_of_the_pictures():
  length = draw_mechanisms._LENGTH
  assert _only(r"The input has (\d+) tokens", _PAGE) == length


_SIZES = re.compile(r"\b(?:32|64|128|256|512|1024|2048|4096)\b|\bC = \d")
_QUOTED = {"the paper's 512 keys", "at a common size: 256 keys"}
"""Of a paper, and tested above."""


def _docstrings(path):
  """Every string of a file that is a statement of its own."""
  for node in ast.walk(ast.parse(path.read_text())):
    match node:
      case ast.Expr(value=ast.Constant(value=str(text))):
        yield " ".join(text.split())


def _sizes(text):
  """The numbers in prose that look like a size of a block."""
  for quoted in _QUOTED:
    text = text.replace(quoted, "")
  # Dtypes and code that is shown have numbers of their own.
  text = re.sub(r"`[^`]*`|\w*(?:float|int)\d+|\w+=\S+|\w+\(.*?\)", "", text)
  return _SIZES.findall(text)


def test_no_docstring_writes_the_size_of_a_block():
  wrong = {
    f"{path.relative_to(_ROOT)}: {size}"
    for path in (_ROOT / "attention").rglob("*.py")
    for text in _docstrings(path)
    for size in _sizes(text)
  }
  assert not wrong, "name the place of the value instead, or test the number"


def test_docstrings_with_such_a_size_are_found():
  assert _sizes("Tiles of C = 64 queries, 128 from W = 257 on.")
  assert not _sizes("`[B, 128]` float32, as in f(x, window=64).")


# What is added so that nothing divides by 0, by values that are as small. Expected
# numbers are written out: 3e-4 / √(25e-8 + 1e-6) = 0.26832816.


def test_epsilon_of_a_unit_length_is_inside_of_the_root():
  x = jnp.asarray([[3e-4, 4e-4], [0.0, 0.0], [3.0, -4.0]])
  expected = [[0.26832816, 0.35777088], [0.0, 0.0], [0.6, -0.8]]
  np.testing.assert_allclose(unit_length(x), expected, rtol=1e-6)


def test_epsilon_of_latent_norms_is_inside_of_the_root():
  record = ATTENTIONS["latent"]()
  variables = record.init(jax.random.key(0), Dims(2, 2, 8, 16, features=2))
  params = variables["params"]
  (size,) = params["norm_scale"].shape
  kernel = jnp.zeros_like(params["down_kernel"]).at[[0, 1], [0, 1]].set(1.0)
  inputs = jnp.asarray([[[1e-3, -2e-3]]]) * size**0.5
  gates = record.gates({"params": {**params, "down_kernel": kernel}}, inputs)
  # (1e-3, -2e-3) / √(5e-6 + 1e-6), as the mean is over all of the latent.
  expected = np.asarray([0.40824829, -0.81649658]) * size**0.5
  np.testing.assert_allclose(gates["latent"][0, 0, :2], expected, rtol=1e-5)


def test_epsilon_of_relu_features_is_added_to_each():
  """Features of keys 2 and −5 are 2.001 and 0.001."""
  one = jnp.ones((1, 1, 1, 1))
  key = jnp.asarray([2.0, -5.0]).reshape(1, 2, 1, 1)
  value = jnp.asarray([0.0, 1.0]).reshape(1, 2, 1, 1)
  out = attention.performer_attention(
    one, key, value, projection=jnp.ones((1, 1)), kernel="relu"
  )
  np.testing.assert_allclose(out.item(), 0.001 / 2.002, rtol=1e-5)


def test_a_normaliser_is_nothing_up_to_its_bound():
  sums = [[3e-30, 2e-30], [3e-31, 1e-31], [-3e-30, -2e-30], [-3e-31, -1e-31]]
  found = features.normalize(jnp.asarray(sums))[:, 0]
  np.testing.assert_allclose(found, [1.5, 0.0, 1.5, 0.0], rtol=1e-6)
  assert jnp.isnan(features.normalize(jnp.asarray([[1.0, jnp.nan]]))).all()


def test_lightning_forgets_in_its_last_layer():
  """By 10⁻⁵ of a slope of 2⁻⁴ at each position, as in MiniMax's code."""
  length = 10_001
  ones = jnp.ones((1, length, 2, 1))
  value = jnp.zeros((1, length, 2, 1)).at[:, 0].set(1.0)
  record = ATTENTIONS["lightning"](depth=1.0)
  out = record.apply({}, ones, ones, value, is_causal=True)[0, :, 0, 0]
  # Each of 10⁴ factors of 1 − 6·10⁻⁷ is rounded by up to 6·10⁻⁸.
  np.testing.assert_allclose(-jnp.log(out[-1] / out[0]), 0.00625, rtol=0.1)


def test_mamba3_has_a_least_rate():
  """10⁻⁴, times the step softplus(0) = 0.6931472."""
  record = ATTENTIONS["mamba3"]()
  dims = Dims(2, 2, 8, 16, features=3)
  params = record.init(jax.random.key(0), dims)["params"]
  zeros = {"step_kernel": 0.0, "step_bias": 0.0, "decay_kernel": -100.0}
  params = params | {n: jnp.full_like(params[n], x) for n, x in zeros.items()}
  gates = record.gates({"params": params}, jnp.ones((1, 4, 3)))
  np.testing.assert_allclose(gates["log_decay"], -6.931472e-5, rtol=1e-5)


_STEPS = math.log(0.001), math.log(0.1)
_RAMP = np.array([-5.5, -2.5, 0.5])
_FIRST = {
  # Of the authors' code, BlinkDL/RWKV-LM: 0.5 − 6 to 0.5, and the constant terms of k_k,
  # a0 and r_k; of version 6, −6 to −1, and zigzags.
  "rwkv7": {
    **{"decay_bias": [_RAMP, _RAMP], "removal_scale": 0.71, "rate_share": 1.0},
    **{"rate_bias": -0.19, "bonus": -0.04},
  },
  "rwkv6": {
    "decay_bias": [[-6.0, -5.0, -4.0], [-3.0, -2.0, -1.0]],
    "bonus": [[0.0, 0.1, -0.1], [0.0, 0.1, -0.1]],
  },
  # xLSTM's forget gates of 3 to 6, the rows of S4D-real, and sigmoid(4) = 0.982.
  "mlstm": {"forget_bias": [3.0, 6.0], "forget_kernel": 0, "input_kernel": 0},
  "mamba": {"log_rate": np.log([[[n] * 3 for n in range(1, 17)]] * 2)},
  "titans": {"decay_bias": 4.0, "momentum_bias": 0.0, "rate_bias": 0.0},
  # softplus(0.11064661) = 0.75, and at least 0.25 more: Λ is 1.
  "mesa": {"regularizer": 0.11064661, "decay_bias": 0.0, "rate_bias": 0.0},
  "comba": {"correction": 0.02},
  "precond_delta": {"center": -0.2},
}


@pytest.mark.parametrize("name", _FIRST)
def test_first_gates_are_those_of_the_authors(name):
  record = ATTENTIONS[name]()
  params = record.init(jax.random.key(0), Dims(2, 2, 3, 16, 5))["params"]
  for one, expected in _FIRST[name].items():
    expected = np.broadcast_to(expected, params[one].shape)
    np.testing.assert_allclose(params[one], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
  ("name", "values", "low", "high"),
  [
    ("mamba2", lambda p: jnp.exp(p["log_rate"]), 1.0, 16.0),
    ("gated_delta", lambda p: jnp.exp(p["log_rate"]), 1.0, 16.0),
    ("mamba2", lambda p: jnp.log(jax.nn.softplus(p["step_bias"])), *_STEPS),
    ("mamba", lambda p: jnp.log(jax.nn.softplus(p["step_bias"])), *_STEPS),
    ("momentum_delta", lambda p: jnp.exp(p["log_factor"]), 0.0, 4.0),
    ("momentum_delta", lambda p: jnp.exp(p["log_correction"]), 0.0, 1.0),
    # a⁸ of Griffin's λ, equation 6 and section 2.4.
    ("rg_lru", lambda p: jax.nn.sigmoid(-p["log_rate"]) ** 8, 0.9, 0.999),
  ],
)
def test_first_rates_are_uniform(name, values, low, high):
  """Of 2,000 heads: the mean is within 3 % of the range, 4.6 standard errors."""
  params = ATTENTIONS[name]().init(
    jax.random.key(0), Dims(2000, 2000, 1, 16, 2)
  )["params"]
  share = (np.asarray(values(params), float) - low) / (high - low)
  assert -1e-5 < share.min() < 0.02
  assert 0.98 < share.max() < 1 + 1e-5
  np.testing.assert_allclose(share.mean(), 0.5, atol=0.03)


_DIMS = Dims(40, 40, 24, 2048, 56)
_OPTIONS = {
  "compressed": {"stride": 4, "top_k": 4},
  "dense": {"sinks": "inputs", "forget": True},
  "linformer": {"rank": 16},
  "moba": {"num_index_heads": 3},
  "nystrom": {"conv_kernel_size": 33},
  "path": {"forget": True},
}
_SPREADS = {
  "linformer": {"": 16**-0.5},
  "multiplicative": {"": 1 / 24},
  "additive": {"score_kernel": 64**-0.5, "": 24**-0.5},
  # Of all 960 channels; and uniform between ±1/√4.
  "mamba": {"step_up": 12**-0.5, "": 960**-0.5},
  "rg_lru": {"": 24**-0.5},
  # A tenth of what others have, as in the authors' code.
  "rwkv6": {"decay_up": 0.1 * 64**-0.5},
  "rwkv7": {"decay_up": 0.1 * 32**-0.5, "rate_up": 0.1 * 32**-0.5},
  "ttt_linear": {"initial_weights": 0.02},
  **{"differential": {"": 0.1}, "mlstm": {"": 0.1}},
  # Of a normal distribution that is cut at two standard deviations.
  "window_2d": {"": 0.02 * 0.8796},
}
"""Standard deviations that are not 1/√(first axis), "" of all others."""


@pytest.mark.parametrize("name", sorted({*ATTENTIONS} - {"window_linear"}))
def test_first_kernels_have_a_spread_and_a_key_of_their_own(name):
  record = ATTENTIONS[name](**_OPTIONS.get(name, {}))
  # Differential attention has vectors of half a head.
  dims = Dims(1, 1, 2000, 16) if name == "differential" else _DIMS
  params = record.init(jax.random.key(0), dims).get("params", {})
  ends = "kernel", "projection", "_up", "_down", "_1", "_2", "relative_bias"
  drawn = {
    one: np.asarray(x, float)
    for one, x in params.items()
    if one.endswith((*ends, "initial_weights", "input_bias")) and np.std(x) > 0
  }
  spreads = _SPREADS.get(name, {})
  for one, x in drawn.items():
    spread = spreads.get(one, spreads.get("", x.shape[0] ** -0.5))
    # Five standard errors of a normal distribution.
    allowed = 5 * spread / np.sqrt(2 * x.size)
    assert abs(np.sqrt((x**2).mean()) - spread) < allowed, one
  for one, other in itertools.combinations(drawn, 2):
    count = min(drawn[one].size, drawn[other].size)
    both = (drawn[x].ravel()[:count] for x in (one, other))
    assert abs(np.corrcoef(*both)[0, 1]) < 6 / np.sqrt(count), (one, other)
