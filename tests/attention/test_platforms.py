"""The same program for a CPU, a GPU and a TPU: numbers, lowering, trips.

No accelerator is here. Programs are traced for one, lowered to its StableHLO
without being compiled, and run on the CPU with the accelerator's budget.
"""

import functools
import importlib.metadata
import os
import pathlib
from platform import machine
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
import pytest

from attention import ATTENTIONS, Dims, gates_from_keys, nystrom_attention
from attention import mechanism as mechanisms
from attention.platform import backend, layout, programs
from attention.recurrent import triangular
from attention.softmax.hashing import hash_buckets
from attention.testing import assert_close
from tests.attention.calls import draw, normal, random_mask
from tests.attention.forms import (
  DERIVED,
  FORMS,
  KINDS,
  OWN,
  RECURRENT,
  SIZES,
)

MOST_TRIPS = 16
"""Steps of a loop that is linear in T, at T 16,384, B 1, N 8, H 64."""


LARGE = (*KINDS, "flash", "bigbird", "kimi_delta")
"""Those of the default suite: of each kind of loop one."""


def is_last(name, is_causal):
  """Whether it is the last direction of a mechanism, causal if it can be."""
  return is_causal or (name, True) not in FORMS


def last_directions(kept):
  """Those kept in their last direction; others `thorough`."""
  return pytest.mark.parametrize(
    ("name", "is_causal"),
    [
      pytest.param(*x, marks=[] if is_kept else pytest.mark.thorough)
      for x in FORMS
      for is_kept in [x[0] in kept and is_last(*x)]
    ],
  )


def on_each(platforms, forms):
  """Forms on platforms; those whose code is another's are on a GPU, others `thorough`."""
  return pytest.mark.parametrize(
    ("name", "is_causal", "where"),
    [
      pytest.param(*form, where, marks=[] if is_kept else pytest.mark.thorough)
      for form in forms
      for where in platforms
      for is_kept in [where == "gpu" or form[0] not in DERIVED]
      if where != "tpu" or is_last(*form)
    ],
  )


def program(name, is_causal, options, dims, mask=None):
  """`(variables, query, key, value, cotangent)` -> output and gradients; shapes of
  variables; whether the query is the key."""
  mechanism = gates_from_keys(ATTENTIONS[name](**options))
  init = functools.partial(mechanism.init, dims=dims)

  def run(variables, query, key, value, cotangent):
    def attend(query, key, value):
      call = {"is_causal": is_causal, "mask": mask}
      return mechanism.apply(variables, query, key, value, **call)

    out, pullback = jax.vjp(attend, query, key, value)
    return out, pullback(cotangent)

  return run, init, "shared_qk" in mechanism.supports


def test_blocks_share_a_length_evenly():
  """As many blocks as of the size that is fast, and no larger than they must be."""
  with backend.tracing_for("cpu"):
    for length in (1, 16, 512, 513, 577, 1000, 1024, 1025, 2049, 5000):
      for bytes_of_pair in (4, 128, 10**9):
        most, _ = backend.block(bytes_of_pair, 512, 512, 2**20, 2**20)
        rows, width = backend.block(bytes_of_pair, 512, 256, length, 2 * length)
        count = -(-length // most)
        assert -(-length // rows) == count
        assert rows <= min(most, length)
        assert count * rows < length + 16 * count
        assert width <= 2 * length
    assert backend.block(10**9, 512, 256, 513, 513) == (272, 176)
    assert backend.block(10**9, 512, 256, 512, 512) == (512, 256)


@last_directions((*KINDS, "linear", "window_linear", "nystrom"))
def test_the_budget_changes_no_number(name, is_causal, monkeypatch):
  """Neither that of an accelerator nor one of a few blocks a step."""
  length, dims = 301, Dims(4, 2, 8, 301, 16)
  query, key, value = draw(length)
  (cotangent, *_) = draw(length, seed=1)
  mask = random_mask(2, 1, 1, length, share=0.8)
  size = SIZES.get(name, {})
  _, init, shares = program(name, is_causal, size, dims)
  variables = jax.jit(init)(jax.random.key(0))
  arguments = variables, query, None if shares else key, value, cotangent

  def found(where):
    run, *_ = program(name, is_causal, size, dims, mask)
    with backend.tracing_for(where):
      return jax.tree.leaves(jax.jit(run)(*arguments))

  expected = found("cpu")
  for tile_bytes in (backend.TILE_BYTES, 40_000):
    monkeypatch.setattr(backend, "TILE_BYTES", tile_bytes)
    for x, y in zip(found("gpu"), expected, strict=True):
      assert_close(x, y, 2e-5)


@on_each(
  ("gpu", "tpu"),
  [x for x in FORMS if x[0] in (*KINDS, *RECURRENT) and is_last(*x)],
)
def test_loops_of_an_accelerator_run_inside_shard_map(name, is_causal, where):
  """The carries of loops vary over devices as the arrays do."""
  length, dims = 150, Dims(4, 2, 8, 150, 16)
  run, init, shares = program(name, is_causal, SIZES.get(name, {}), dims)
  variables = jax.eval_shape(init, jax.random.key(0))
  query, key, value = draw(length)
  mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
  rows = PartitionSpec("data")
  sharded = jax.shard_map(
    run,
    mesh=mesh,
    in_specs=(PartitionSpec(), rows, rows, rows, rows),
    out_specs=rows,
  )
  with backend.tracing_for(where):
    out, gradients = jax.eval_shape(
      sharded, variables, query, None if shares else key, value, query
    )
  assert out.shape == query.shape
  assert gradients[0].shape == query.shape


@on_each(("cpu", "gpu", "tpu"), FORMS)
def test_arrays_of_32_bits_stay_so_where_64_are_allowed(name, is_causal, where):
  """Over several chunks: a constant of 64 bits makes a loop's carry wider."""
  length, dims = 150, Dims(4, 2, 8, 150, 16)
  arrays = *draw(length), draw(length)[0]
  run, init, shares = program(name, is_causal, SIZES.get(name, {}), dims)
  variables = jax.eval_shape(init, jax.random.key(0))
  query, key, value, cotangent = arrays
  arguments = variables, query, None if shares else key, value, cotangent
  with backend.tracing_for(where), jax.enable_x64(True):
    found = jax.eval_shape(run, *arguments)
  for x in jax.tree.leaves(found):
    assert x.dtype in (jnp.float32, jax.dtypes.float0)


@pytest.mark.parametrize(
  "name",
  [x for x in OWN if mechanisms.can(mechanisms.example(OWN[x]), "decode")],
)
def test_a_cache_keeps_its_dtypes_where_64_bits_are_allowed(name):
  mechanism = gates_from_keys(ATTENTIONS[name](**SIZES.get(name, {})))
  dims = Dims(4, 2, 8, 20, 16)
  query, key, value = draw(5)
  qkv = query, None if "shared_qk" in mechanism.supports else key, value
  if "own_keys" in mechanism.supports:
    qkv = *qkv[:2], None

  def decoded(qkv):
    variables = mechanism.init(jax.random.key(0), dims)
    cache = mechanism.init_cache(variables, 2, 20, dims, jnp.float32)
    after = cache
    if mechanism.prefill is not None:
      lengths = jnp.array([3, 5], jnp.int32)
      after = mechanism.prefill(variables, cache, *qkv, lengths)
    row = jax.tree.map(lambda x: x[:, :1], qkv)
    out, last = mechanism.decode(variables, after, *row)
    return cache, after, last, out

  with jax.enable_x64(True):
    cache, after, last, out = jax.eval_shape(decoded, qkv)
  assert cache == after == last
  assert out.dtype == jnp.float32


@functools.cache
def traced(name, is_causal, where, length=16_384):
  """Forward and backward, traced for an accelerator."""
  shape = jax.ShapeDtypeStruct((1, length, 8, 64), jnp.bfloat16)
  options = {
    "sliding_window": {"window": 256},
    "linformer": {"rank": 256},
    "additive": {"width": 16},
    # Iterations of a solver, at any length; the loops over chunks have fewer steps.
    "mesa": {"num_iterations": 10},
    "gka": {"num_iterations": 10},
  }.get(name, {})
  dims = Dims(8, 8, 64, length, 512)
  run, init, shares = program(name, is_causal, options, dims)
  variables = jax.eval_shape(init, jax.random.key(0))
  with backend.tracing_for(where):
    arguments = variables, shape, None if shares else shape, shape, shape
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


@last_directions(LARGE)
def test_every_mechanism_lowers_for_an_accelerator(name, is_causal):
  lowers(name, is_causal, "gpu")


@last_directions(KINDS)
def test_each_kind_lowers_for_a_tpu(name, is_causal):
  lowers(name, is_causal, "tpu")


def lowers(name, is_causal, where):
  program = traced(name, is_causal, where)
  target = {"gpu": "cuda"}.get(where, where)
  with backend.tracing_for(where):
    text = program.lower(lowering_platforms=(target,)).as_text()
  assert "stablehlo" in text
  # Decays may be constants: without a barrier a compiler for GPUs would compute those
  # of all pairs itself, for minutes.
  assert "optimization_barrier" in text or name not in RECURRENT


@last_directions([x for x in LARGE if ATTENTIONS[x]().cost != "quadratic"])
def test_an_accelerator_gets_few_large_steps(name, is_causal):
  if ATTENTIONS[name]().cost == "quadratic":
    pytest.skip("its time is T², and so is the number of its tiles")
  if name == "ttt_linear":
    pytest.skip("a mini-batch has to wait for the one before it")
  on_gpu, on_cpu = (
    list(trips(traced(name, is_causal, where).jaxpr.jaxpr))
    for where in ("gpu", "cpu")
  )
  assert max(on_gpu, default=1) <= MOST_TRIPS, on_gpu
  assert max(on_cpu, default=1) >= max(on_gpu, default=1), on_cpu


@pytest.mark.parametrize(
  ("function", "arrays", "exact", "others"),
  [
    (hash_buckets, normal((1, 9, 2, 8), (2, 8, 3)), 1, 0),
    # Two means, A, four products of the iteration and A⁺ · (B V); the others are two
    # of each softmax.
    (functools.partial(nystrom_attention, num_landmarks=2), draw(9), 8, 4),
    (triangular.running_sum, normal((2, 5, 3)), 1, 0),
    (
      layout.add_blocks,
      [*normal((1, 6, 2, 4), (3, 1, 2, 3, 4)), [0, 1, 0]],
      1,
      0,
    ),
  ],
)
def test_a_tpu_rounds_no_factor_that_has_to_be_exact(
  function, arrays, exact, others
):
  """By default it rounds those of float32 to bfloat16."""
  with backend.tracing_for("tpu"):
    text = jax.jit(function).lower(*map(jnp.asarray, arrays)).as_text()
  products = re.findall(r"dot_general.*", text)
  count = sum("HIGHEST" in x for x in products)
  assert (count, len(products) - count) == (exact, others)


def test_one_export_has_a_plan_for_each():
  """The products of every platform in its program, and the result here."""
  arrays = [{}, *draw(2048, heads=2, batch=1)[:1] * 4]
  dims = Dims(2, 2, 8, 2048, 16)
  run, *_ = program("sliding_window", True, {"window": 99}, dims)
  portable = jax.jit(backend.portable(run))

  def products(function, target):
    traced = function.trace(*arrays).lower(lowering_platforms=(target,))
    return sorted(re.findall(r"dot_general.* : (.*)", traced.as_text()))

  found = {x: products(portable, x) for x in ("cpu", "cuda", "tpu")}
  for target, where in ("cpu", "cpu"), ("cuda", "gpu"), ("tpu", "tpu"):
    with backend.tracing_for(where):
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
    programs.clear_cache()
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(backend, "TILE_BYTES", tile_bytes)
      program = traced.__wrapped__("sliding_window", False, "gpu")
      found = trips(program.jaxpr.jaxpr)
    programs.clear_cache()
    # 128 rows see 640 keys: 2.5 MiB of scores, and as much of keys and values.
    assert set(found) == {expected}


def test_versions_with_the_faulty_fusion():
  right = "0.9.2", "0.10.1", "0.12.1", "0.13.0.dev20270101"
  faulty = "0.10.2", "0.11.0", "0.12.0", "0.12.0.1"
  assert not any(map(backend.has_faulty_fusion, right))
  assert all(map(backend.has_faulty_fusion, faulty))


_FUSION = """
import jax, jax.numpy as jnp, numpy as np
f = lambda x: (x @ jnp.full((32, 32), 3.0, x.dtype)).sum(-1)
print(np.allclose(jax.jit(f)(np.ones((512, 32), np.float32)), 3 * 32 * 32))
import attention
"""


@pytest.mark.skipif(
  machine() not in ("x86_64", "AMD64"), reason="the fault is of x86-64"
)
@pytest.mark.parametrize("flags", ["", f"{backend.FUSION_FLAG}="])
def test_the_import_warns_where_this_jaxlib_has_the_fault(flags):
  """And the table of versions is right about this one."""
  done = subprocess.run(
    [sys.executable, "-c", _FUSION],
    env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=True,
  )
  version = importlib.metadata.version("jaxlib")
  is_faulty = backend.has_faulty_fusion(version) and not flags
  assert done.stdout == f"{not is_faulty}\n"
  advice = f"set XLA_FLAGS={backend.FUSION_FLAG}= in the environment"
  assert done.stderr.count(advice) == is_faulty
