"""The table of a device beside its CPU."""

import jax.numpy as jnp
import pytest

from benchmarks import agreement, programs
from tests import commands

SIZE = programs.Size(2, 2, 8, "bfloat16")
ROUNDED = [("float32", "highest"), ("bfloat16", None)]


@pytest.mark.parametrize("of", [programs.FORWARD, programs.TRAINING])
def test_a_cpu_agrees_with_itself(of):
  (program,) = [
    x for x in programs.programs(["retention"], SIZE, 16) if x.part == of
  ]
  function = program.function
  exact, rounded = agreement._cells(
    function, function, program.arguments, ROUNDED
  ).split(" | ")
  assert float(exact) == 0.0
  assert 0.0 < float(rounded) < 2e-2


@pytest.mark.parametrize("name", agreement._calls(SIZE, 16))
def test_gradients_of_calls(name):
  attend, arrays = agreement._calls(SIZE, 16)[name]
  part = programs.gradients(attend)
  cell = agreement._cells(part, part, arrays, ROUNDED[1:])
  assert 0.0 < float(cell) < 2e-2


def test_a_difference_is_relative_to_all_arrays():
  expected = [jnp.array([4.0, 1.0]), jnp.array(1e-9)]
  given = [jnp.array([4.0, 3.0]), jnp.array(1.0)]
  assert agreement._difference(given, expected) == 0.5
  given[1] = jnp.array(jnp.nan)
  assert jnp.isnan(agreement._difference(given, expected))


def test_what_a_device_refuses_is_a_cell():
  def refuses(x):
    if x.dtype == jnp.float32:
      raise NotImplementedError("Unsupported dtype.\nmore")
    return x

  arrays = [jnp.ones(2, jnp.bfloat16)]
  cells = agreement._cells(refuses, lambda x: x, arrays, ROUNDED)
  assert cells == "Unsupported dtype. | 0.0e+00"


def test_it_needs_another_device():
  code, _, error = commands.run_module("benchmarks.agreement")
  assert (code, error) == (
    2,
    "JAX found no GPU or TPU to compare with the CPU\n",
  )
