"""An eager call compiles once: every function, every mechanism, their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attention
from attention import mechanism as mechanisms
from attention.platform import backend, programs
from attention.testing.transforms import compilations
from tests.attention.calls import draw
from tests.attention.test_examples import FUNCTIONS, H, N, T, example


def test_every_function_is_decorated_as_those_that_compile_once():
  codes = {name: getattr(attention, name).__code__ for name in FUNCTIONS}
  own = codes["dense_attention"]
  assert [name for name, code in codes.items() if code is not own] == []


_COMPILED = (
  *("dense", "flash", "sliding_window", "linear", "lsh", "delta_rule"),
  *("mamba", "moba", "titans"),
)
"""Of each kind of loops one."""


@pytest.mark.parametrize(
  "name",
  [
    pytest.param(name, marks=[] if is_kept else pytest.mark.thorough)
    for name in FUNCTIONS
    for is_kept in [name.removesuffix("_attention") in _COMPILED]
  ],
)
def test_a_second_call_of_a_function_compiles_nothing(name):
  code, arrays = example(name)
  names = {name: getattr(attention, name)} | arrays

  def call(q):
    return eval(code, names | {"q": q})

  def gradient(q):
    return jax.grad(lambda q: jnp.square(call(q)).sum())(q)

  first, second = arrays["q"], 0.5 * arrays["q"]
  for compute in (call, gradient):
    jax.block_until_ready(compute(first))
    with compilations() as compiled:
      jax.block_until_ready(compute(second))
    assert compiled == []


@pytest.mark.parametrize("name", attention.ATTENTIONS)
def test_equal_hyperparameters_have_one_record(name):
  """So that `performer().apply(…)` compiles once as well."""
  factory = attention.ATTENTIONS[name]
  options = dict.fromkeys(mechanisms.required_names(factory), 2)
  assert factory(**options) is factory(**options)


def test_hyperparameters_that_differ_have_their_own_record():
  assert attention.sliding_window(window=4) is not attention.sliding_window(5)
  assert attention.linear(attention.elu_plus_one) is not attention.linear()


def test_options_that_are_equal_numbers_of_other_types_stay_apart():
  """1 == True, but True is refused as a window, also after a call with 1."""
  q, k, v = draw(9)
  attention.sliding_window_attention(q, k, v, window=1)
  with pytest.raises(ValueError, match=r"^window: "):
    attention.sliding_window_attention(q, k, v, window=True)


def test_a_function_among_the_options_is_read_in_every_call():
  """It may read a variable that has changed since the last call."""
  q, k, v = draw(9)
  slope = 0.0

  def fall(score, b, n, t, s):
    return score - slope * jnp.abs(t - s)

  for slope in (0.0, 2.0):
    distance = jnp.abs(jnp.arange(9)[:, None] - jnp.arange(9)[None])
    expected = attention.dense_attention(
      q, k, v, bias=-slope * distance[None, None].astype(q.dtype)
    )
    out = attention.flash_attention(q, k, v, score_mod=fall)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_a_program_belongs_to_the_platform_that_it_is_traced_for():
  q, k, v = draw(1500)
  jaxprs = []
  for name in ("cpu", "gpu"):
    with backend.tracing_for(name):
      flash = functools.partial(attention.flash_attention)  # Traced anew.
      jaxprs.append(str(jax.make_jaxpr(flash)(q, k, v)))
  assert jaxprs[0] != jaxprs[1]


def test_settings_of_jax_are_read_in_every_call():
  q, k, v = draw(9)
  with jax.enable_x64(True):
    wide = [jnp.asarray(np.asarray(x), jnp.float64) for x in (q, k, v)]
    assert (
      attention.performer_attention(*wide, projection=jnp.eye(8)).dtype
      == jnp.float64
    )
  assert (
    attention.performer_attention(
      q, k, v, projection=jnp.eye(8, dtype=jnp.float32)
    ).dtype
    == jnp.float32
  )


def test_programs_are_bounded():
  programs.clear_cache()
  q, k, v = draw(3)
  for _ in range(1000):
    attention.dense_attention(q, k, v)
  assert programs._program.cache_info().currsize == 1
  assert programs._program.cache_info().maxsize == programs.MAX_PROGRAMS


def test_a_cache_that_is_full_is_refused_in_an_eager_call():
  """The index of a cache is a number here, though it is an input of a program."""
  record, dims = attention.dense(), attention.Dims(N, N, H, T)
  cache = record.init_cache({}, 1, 2, dims, jnp.float32)
  one = jnp.ones((1, 1, N, H))
  for _ in range(2):
    out, cache = record.decode({}, cache, one, one, one)
    np.testing.assert_allclose(out, 1.0)
  with pytest.raises(ValueError, match=r"^cache: expected a position below"):
    record.decode({}, cache, one, one, one)
