"""The same program for a CPU, a GPU and a TPU: numbers, lowering, trips.

No accelerator is here. Programs are traced for one, lowered to its StableHLO
without being compiled, and run on the CPU with the accelerator's budget.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys, platform
from attention.testing import assert_close
from tests.attention.forms import FORMS, KINDS, RECURRENT, SIZES

MOST_TRIPS = 16
"""Steps of a loop that is linear in T, at T 16,384, B 1, N 8, H 64."""


def form(name, is_causal, is_thorough):
  marks = [pytest.mark.thorough] if is_thorough else []
  return pytest.param(name, is_causal, marks=marks)


LARGE = (*KINDS, "flash", "bigbird", "kimi_delta")
"""Those of the default suite: of each kind of loop one."""

# The default suite has each of them in its last direction, causal if it can.
ONE_DIRECTION_FIRST = [
  form(*x, x[0] not in LARGE or ((x[0], True) in FORMS and not x[1]))
  for x in FORMS
]


def program(name, is_causal, options, dims, mask=None):
  """Output and gradients, and the mechanism's variables."""
  mechanism = gates_from_keys(ATTENTIONS[name](**options))
  variables = mechanism.init(jax.random.key(0), dims)

  def run(query, key, value, cotangent):
    def attend(query, key, value):
      return mechanism.apply(
        variables, query, key, value, is_causal=is_causal, mask=mask
      )

    out, pullback = jax.vjp(attend, query, key, value)
    return out, pullback(cotangent)

  return run, "shared_qk" in mechanism.supports


def test_blocks_share_a_length_evenly():
  """As many blocks as of the size that is fast, and no larger than they must be."""
  with platform.tracing_for("cpu"):
    for length in (1, 16, 512, 513, 577, 1000, 1024, 1025, 2049, 5000):
      for bytes_of_pair in (4, 128, 10**9):
        most, _ = platform.block(bytes_of_pair, 512, 512, 2**20, 2**20)
        rows, width = platform.block(
          bytes_of_pair, 512, 256, length, 2 * length
        )
        count = -(-length // most)
        assert -(-length // rows) == count
        assert rows <= min(most, length)
        assert count * rows < length + 16 * count
        assert width <= 2 * length
    assert platform.block(10**9, 512, 256, 513, 513) == (272, 176)
    assert platform.block(10**9, 512, 256, 512, 512) == (512, 256)


@pytest.mark.parametrize(
  ("name", "is_causal"),
  [
    form(*x, x[0] not in KINDS or ((x[0], True) in FORMS and not x[1]))
    for x in FORMS
  ],
)
@pytest.mark.parametrize(
  ("length", "masked"),
  [
    pytest.param(64, False, id="plain", marks=pytest.mark.thorough),
    pytest.param(101, True, id="masked"),
  ],
)
def test_the_budget_changes_no_number(name, is_causal, masked, length):
  rng = np.random.default_rng(0)
  query, key, value, cotangent = (
    jnp.asarray(rng.standard_normal((2, length, n, 8)), jnp.float32)
    for n in (4, 2, 2, 4)
  )
  mask = jnp.asarray(rng.random((2, 1, 1, length)) < 0.8) if masked else None
  dims = Dims(4, 2, 8, length, 16)

  def found(where):
    with platform.tracing_for(where):
      run, shares = program(name, is_causal, SIZES.get(name, {}), dims, mask)
      arguments = (query, None if shares else key, value, cotangent)
      return jax.tree.leaves(jax.jit(run)(*arguments))

  for got, expected in zip(found("gpu"), found("cpu"), strict=True):
    assert_close(got, expected, 2e-5)


@functools.cache
def traced(name, is_causal, where, length):
  """Forward and backward, traced for an accelerator."""
  shape = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)
  options = {
    "sliding_window": {"window": 256},
    "linformer": {"rank": 256},
    "additive": {"width": 16},
    "mesa": {"num_iterations": 10},  # Of a solver: the steps are fewer.
  }.get(name, {})
  dims = Dims(8, 8, 64, length, 512)
  with platform.tracing_for(where):
    run, shares = program(name, is_causal, options, dims)
    arguments = (shape, None if shares else shape, shape, shape)
    return jax.jit(run).trace(*arguments)


def trips(jaxpr):
  """The fixed trip counts of all loops of a traced program."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == "scan":
      yield equation.params["length"]
    for parameter in equation.params.values():
      for inner in parameter if isinstance(parameter, tuple) else (parameter,):
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
          yield from trips(inner)


@pytest.mark.parametrize(
  "where", ["gpu", pytest.param("tpu", marks=pytest.mark.thorough)]
)
@pytest.mark.parametrize(("name", "is_causal"), ONE_DIRECTION_FIRST)
def test_every_mechanism_lowers_for_an_accelerator(name, is_causal, where):
  lowers(name, is_causal, where)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_lowers_for_a_tpu(name):
  lowers(name, False, "tpu")


def lowers(name, is_causal, where):
  program = traced(name, is_causal, where, 16_384)
  target = {"gpu": "cuda"}.get(where, where)
  with platform.tracing_for(where):
    text = program.lower(lowering_platforms=(target,)).as_text()
  assert "stablehlo" in text
  # A barrier is for XLA on a CPU, and for decays, which may be constants: a compiler
  # for GPUs would compute those of all pairs itself, for minutes.
  assert ("optimization_barrier" in text) == (name in RECURRENT)


@pytest.mark.parametrize(("name", "is_causal"), ONE_DIRECTION_FIRST)
def test_an_accelerator_gets_few_large_steps(name, is_causal):
  if ATTENTIONS[name]().cost == "quadratic":
    pytest.skip("its time is T², and so is the number of its tiles")
  on_gpu, on_cpu = (
    list(trips(traced(name, is_causal, where, 16_384).jaxpr.jaxpr))
    for where in ("gpu", "cpu")
  )
  assert max(on_gpu, default=1) <= MOST_TRIPS, on_gpu
  assert max(on_cpu, default=1) >= max(on_gpu, default=1), on_cpu


def test_one_export_has_a_plan_for_each():
  """The products of every platform in its program, and the result here."""
  rng = np.random.default_rng(0)
  arrays = [jnp.asarray(rng.normal(size=(1, 2048, 2, 8)), jnp.float32)] * 4
  run, _ = program(
    "sliding_window", True, {"window": 99}, Dims(2, 2, 8, 2048, 16)
  )
  portable = jax.jit(platform.portable(run))

  def products(function, target):
    traced = function.trace(*arrays).lower(lowering_platforms=(target,))
    return sorted(re.findall(r"dot_general.* : (.*)", traced.as_text()))

  found = {x: products(portable, x) for x in ("cpu", "cuda", "tpu")}
  for target, where in ("cpu", "cpu"), ("cuda", "gpu"), ("tpu", "tpu"):
    with platform.tracing_for(where):
      alone = products(jax.jit(lambda *arrays: run(*arrays)), target)
    assert found[target] == alone
  assert found["cpu"] != found["cuda"]
  exported = jax.export.export(portable, platforms=tuple(found))(*arrays)
  called = exported.call(*arrays)
  expected = jax.jit(run)(*arrays)
  for one, other in zip(*map(jax.tree.leaves, (called, expected)), strict=True):
    assert_close(one, other, 1e-6)


def test_the_trips_are_what_the_budget_says():
  for tile_bytes, expected in ((2**29, 2), (2**27, 6)):
    accelerator = platform.ACCELERATOR._replace(tile_bytes=tile_bytes)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(platform, "ACCELERATOR", accelerator)
      program = traced.__wrapped__("sliding_window", False, "gpu", 16_384)
      found = trips(program.jaxpr.jaxpr)
    # 128 rows see 640 keys: 2.5 MiB of scores, and as much of keys and values.
    assert set(found) == {expected}
