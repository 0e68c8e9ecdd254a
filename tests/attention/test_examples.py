"""The first lines of every docstring work as they stand."""

import functools
import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention.testing import assert_close
from tests.attention.calls import pulled

FUNCTIONS = [name for name in attention.__all__ if name.endswith("_attention")]

T, N, H, R = 256, 2, 16, 8
X = jnp.asarray(np.random.default_rng(0).normal(size=(1, T, N, H)), "f4")
DECAY = jnp.asarray(-(np.asarray(X) ** 2))


def ones(*shape):
  return jnp.asarray(np.ones(shape, "f4"))


SHARED = {"q": X, "k": X, "v": X, "keep": jnp.ones((1, T), bool)}
KERNEL = jnp.tile(jnp.eye(H), (N, 1, 1))

OWN = {
  "additive": {"w": KERNEL, "u": KERNEL, "s": ones(N, H)},
  "bigbird": {"blocks": jnp.zeros((N, 2, 1), int)},
  "compressed": {"c": X[:, : T // 128]},
  "delta_product": {
    **{name: X[:, :, None] for name in "kv"},
    "beta": ones(1, T, 1, N),
    "log_decay": DECAY[..., 0],
  },
  "delta_rule": {"beta": ones(1, T, N), "log_decay": DECAY[..., 0]},
  "dsa": {"a": X, "b": X[:, :, 0], "w": X[..., 0]},
  "gated_linear": {"log_decay": DECAY[..., 0]},
  "latent": {"c": X[:, :, 0, :R], "w": ones(R, N, H), "u": ones(R, N, H)},
  "log_linear": {"g": DECAY[..., 0], "scales": ones(1, T, N, 9)},
  "linformer": {"e": ones(T, R) / T, "f": ones(T, R) / T},
  "lsh": {"rotations": ones(2, H, 2)},
  "gsa": {"g": DECAY, "s": 1.0 - jnp.exp(DECAY)},
  "mamba": {
    **dict(zip("cbx", (X, X, X), strict=True)),
    "delta": X**2,
    "log_rate": ones(N, H, H),
  },
  "gka": {"g": DECAY[..., 0], "b": ones(1, T, N), "a": ones(1, T, N)},
  "mesa": {"g": DECAY[..., 0], "b": ones(1, T, N), "r": ones(N, H)},
  "mlstm": {"g": DECAY[..., 0], "i": X[..., 0]},
  "multiplicative": {"w": KERNEL},
  "nsa": {"g": ones(1, T, N, 3), "w": ones(N, 32), "u": ones(N, 32)},
  "path": {
    "w": X / jnp.linalg.norm(X, axis=-1, keepdims=True),
    "beta": ones(1, T, N),
  },
  "performer": {"w": jnp.eye(H)},
  "selected": {"indices": jnp.arange(T).reshape(1, T, 1, 1) // 64},
  "rg_lru": {"x": X, "log_decay": DECAY, "i": ones(*X.shape)},
  "momentum_delta": {
    **{"b": ones(1, T, N), "n": ones(1, T, N)},
    **{"g": DECAY[..., 0], "h": DECAY[..., 0]},
  },
  "precond_delta": {
    **{"b": ones(1, T, N), "g": DECAY, "r": ones(1, T, N)},
    **{"a": DECAY[..., 0], "c": jnp.zeros(N)},
  },
  "rwkv6": {"g": DECAY, "u": ones(N, H)},
  "rwkv7": {"g": DECAY, "a": -X / 4, "b": X / 4},
  "titans": {
    **{"theta": ones(1, T, N) / 8, "m": DECAY[..., 0], "g": DECAY[..., 1]}
  },
  "ttt_linear": {
    **{"eta": ones(1, T, N), "w": KERNEL, "b": ones(N, H)},
    **{"gamma": ones(N, H), "beta": ones(N, H)},
  },
  "window_linear": {"w": KERNEL, "u": KERNEL, "g": jnp.zeros(N)},
}


def example(name):
  """The code of a function's first example, and the arrays in it."""
  lines = inspect.getdoc(getattr(attention, name)).split("\n\n")
  code = re.fullmatch(r"out = (.*)", lines[1].strip(), re.DOTALL)[1]
  return code, SHARED | OWN.get(name.removesuffix("_attention"), {})


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_runs(name):
  """Traced, because the numbers are the contract's."""
  code, arrays = example(name)
  names = {name: getattr(attention, name)} | arrays
  out = jax.eval_shape(lambda: eval(code, names))
  assert (out.shape, out.dtype) == (X.shape, X.dtype)


SCALED = "dense", "flash", "sliding_window", "lsh", "nystrom", "window_2d"


@pytest.mark.parametrize("name", SCALED)
def test_a_traced_scale_has_a_gradient(name):
  """Only the product of scale and query matters."""
  name = f"{name}_attention"
  code, arrays = example(name)

  def run(scale, query):
    function = functools.partial(getattr(attention, name), scale=scale)
    return eval(code, {name: function} | arrays | {"q": query})

  out, (by_scale, by_query) = pulled(run, jnp.float32(0.4), X)
  assert_close(out, run(0.4, X), 1e-6)
  np.testing.assert_allclose(0.4 * by_scale, np.sum(by_query * X), rtol=1e-3)


def options(function):
  """The names of all arguments, also those of a TypedDict of keywords."""
  for name, parameter in inspect.signature(function).parameters.items():
    if parameter.kind is parameter.VAR_KEYWORD:
      [keywords] = typing.get_args(typing.get_type_hints(function)[name])
      yield from typing.get_type_hints(keywords)
    else:
      yield name


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_argument_has_a_line_of_its_own(name):
  function = getattr(attention, name)
  args = inspect.getdoc(function).partition("\nArgs:\n")[2]
  lines = re.findall(r"^  (\w+): ", args.partition("\n\n")[0], re.MULTILINE)
  assert sorted(lines) == sorted(options(function))
