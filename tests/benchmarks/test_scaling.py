"""The scaling benchmark: rows, budget, and the arithmetic of its tables."""

import json

import jax
import numpy as np
import pytest

from attention import ATTENTIONS, Dims
from attention import mechanism as mechanisms
from benchmarks import bounds, programs, scaling_tables, timing
from tests import commands
from tests.attention.forms import kinds_first

SIZE = programs.Size(heads=2, head_dim=8)
KEYS = {
  "mechanism",
  "causal",
  "part",
  "length",
  "seconds",
  "spread",
  "temp_bytes",
  "compile_seconds",
}


class Fake:
  """A program that is quick to compile, and as slow as it says."""

  mechanism, causal, part = "dense", False, programs.FORWARD
  temp_bytes = needed_bytes = 2**30
  compile_seconds = 0.0
  repeats = 1

  def __init__(self, length, seconds, clock):
    self.length, self.calls = length, 0
    self._seconds, self._clock = seconds, clock

  def compile(self):
    self._clock.now += 5.0

  def seconds(self):
    self.calls += 1
    self._clock.now += self._seconds
    return self._seconds


class Clock:
  now = 100.0

  def perf_counter(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  fake = Clock()
  monkeypatch.setattr(timing, "time", fake)
  return fake


def row(length, seconds, name="dense", temp=0, **more):
  return {
    "mechanism": name,
    "causal": False,
    "part": programs.FORWARD,
    "length": length,
    "seconds": seconds,
    "spread": None,
    "temp_bytes": temp,
    "compile_seconds": 1.0,
    **more,
  }


def test_rows_of_a_tiny_run():
  names = [programs.BASELINE, "linear", "linformer"]
  lengths = [8, 16]
  budget = timing.Budget(60.0, lengths)
  rows = []
  for length in lengths:
    made = programs.programs(names, SIZE, length)
    rows += timing.time_length(made, budget, 2**30, rows)
  assert all(row.keys() == KEYS for row in rows)
  assert {row["length"] for row in rows} == set(lengths)
  assert all(row["seconds"] > 0.0 <= row["spread"] for row in rows)
  found = {(row["mechanism"], row["causal"], row["part"]) for row in rows}
  assert len(rows) == 2 * len(found) == 2 * (2 * 4 + 2 + 1)
  assert ("linformer", True, "forward") not in found
  assert {name for name, _, part in found if part == "decode"} == {"linear"}
  text = scaling_tables.markdown(rows)
  assert text.count("\n| `linear` |") == 3 * (2 + 2 + 1)
  assert "not run" not in text


@pytest.mark.parametrize("name", kinds_first(ATTENTIONS, "gated_delta"))
def test_programs_compute_what_they_are_named(name):
  """Traced only: gradients of all that is trained, and a step of the cache."""
  made = {}
  for program in programs.programs([name], SIZE, 32):
    made[program.causal, program.part] = jax.eval_shape(
      program.function, *program.arguments
    )
    arguments = program.arguments
  shape = (1, 32, 2, 8)
  is_causal = mechanisms.directions(ATTENTIONS[name]())[0]
  assert made[is_causal, "forward"].shape == shape
  *gradients, d_value = made[is_causal, "forward+backward"]
  assert d_value.shape == shape
  variables = programs.make(name, 32).init(
    jax.random.key(0), Dims(SIZE.heads, SIZE.heads, SIZE.head_dim, 32, 16)
  )
  shapes = jax.tree.map(lambda x: x.shape, variables.get("params", {}))
  assert jax.tree.map(lambda x: x.shape, gradients[0]) == shapes
  assert ((True, "decode") in made) == ("decode" in ATTENTIONS[name]().supports)
  if (True, "decode") in made:
    out, cache = made[True, "decode"]
    assert out.shape == (1, 1, 2, 8)
    same = jax.tree.map(lambda x, y: x.shape == y.shape, cache, arguments[0])
    assert all(jax.tree.leaves(same))


def test_decoding_stays_at_the_last_position():
  *_, program = programs.programs(["dense"], SIZE, 16)
  program.compile()
  for _ in range(2):
    program.seconds()
    cache = program.arguments[0]
    assert cache.index.tolist() == [15]
    written = np.any(np.asarray(cache.key) != 0.0, axis=(0, 2, 3))
    assert written.tolist() == [False] * 15 + [True]


class Failing(Fake):
  """One that a device refuses, when it is compiled or when it is called."""

  def __init__(self, when, clock):
    super().__init__(16, 1.0, clock)
    self._when = when

  def compile(self):
    if self._when == "compile":
      raise NotImplementedError("Unsupported length 17.\nmore")

  def seconds(self):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")


@pytest.mark.parametrize(
  ("when", "reason"),
  [
    ("compile", "not run: Unsupported length 17."),
    ("call", "not run: RESOURCE_EXHAUSTED: Out of memory"),
  ],
)
def test_what_fails_is_a_row(clock, when, reason):
  sound = Fake(16, 1.0, clock)
  budget = timing.Budget(1000.0, [16], clock.perf_counter)
  made = [Failing(when, clock), sound]
  failed, row_of_sound = timing.time_length(made, budget, 2**31)
  assert (failed["seconds"], failed["reason"]) == (None, reason)
  assert (failed["temp_bytes"] is None) == (when == "compile")
  assert row_of_sound["seconds"] == 1.0
  assert reason in scaling_tables.markdown([failed, row_of_sound])


def test_an_accelerator_makes_short_calls_in_a_row(monkeypatch, clock):
  program = Fake(16, 0.003, clock)
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  budget = timing.Budget(1000.0, [16], clock.perf_counter)
  timing.time_length([program], budget, 2**31)
  assert program.repeats == 7


def test_what_needs_too_much_memory_is_not_run(clock):
  program = Fake(16, 1.0, clock)
  budget = timing.Budget(1000.0, [16], clock.perf_counter)
  (found,) = timing.time_length([program], budget, 2**29)
  assert program.calls == 0
  assert found["seconds"] is None
  assert found["reason"] == ("not run: needs 1 GiB; --max_gib allows 0.5")
  assert found["temp_bytes"] == 2**30
  assert found["reason"] in scaling_tables.markdown([found])


def test_a_budget_is_shared_in_proportion_to_length(clock):
  budget = timing.Budget(80.0, [1, 2, 4], clock.perf_counter)
  clock.now += 5.0
  budget.compiled(5.0)
  # Compiling takes 15 in all.
  assert budget.share() == pytest.approx(65.0 / 7)
  clock.now += 2.0
  budget.next()
  # The rest of the first share is the others'.
  assert budget.share() == pytest.approx((80.0 - 15.0 - 2.0) * 2 / 6)


def test_calls_end_with_the_budget(clock):
  quick, slow, hopeless = (Fake(32, s, clock) for s in (0.1, 8.0, 90.0))
  before = [row(16, 0.1), row(16, 2.0), row(16, 22.5)]
  for i, program in enumerate((quick, slow, hopeless)):
    program.mechanism = before[i]["mechanism"] = f"number {i}"
  budget = timing.Budget(15.0 + 30.0, [32], clock.perf_counter)
  found = timing.time_length([quick, slow, hopeless], budget, 2**31, before)
  # One to warm up, then ten rounds, or what fits into 30 seconds.
  assert [quick.calls, slow.calls, hopeless.calls] == [11, 3, 0]
  assert [x["seconds"] for x in found] == [0.1, 8.0, None]
  assert found[2]["reason"] == (
    "not run: a call would take up to 90 s, more than --minutes leaves"
  )


def test_short_calls_are_made_when_the_budget_is_spent(clock):
  short, longer = Fake(32, 0.05, clock), Fake(32, 0.9, clock)
  budget = timing.Budget(1.0, [32], clock.perf_counter)
  timing.time_length([short, longer], budget, 2**31, [row(16, 0.2)])
  assert [short.calls, longer.calls] == [4, 1]


def test_a_program_with_time_for_one_call_has_no_spread(clock):
  program = Fake(16, 20.0, clock)
  budget = timing.Budget(35.0, [16], clock.perf_counter)
  (found,) = timing.time_length([program], budget, 2**31)
  assert program.calls == 1
  assert (found["seconds"], found["spread"]) == (20.0, None)


def test_exponent_is_that_of_the_upper_half():
  lengths = [256, 512, 1024, 2048, 4096, 8192, 16384]
  values = {x: 3e-9 * x**1.5 for x in lengths}
  values |= {x: 1.0 for x in lengths[:3]}
  assert scaling_tables.exponent(values, lengths) == pytest.approx(1.5)
  # What was not run is missing; one point has no slope.
  del values[16384]
  assert scaling_tables.exponent(values, lengths) == pytest.approx(1.5)
  assert scaling_tables.exponent({16384: 1.0}, lengths) is None


def test_crossover_is_where_the_lines_cross():
  lengths = [256, 512, 1024, 2048]
  dense = {x: 1e-6 * x**2 for x in lengths}
  linear = {x: 1e-6 * 700 * x for x in lengths}
  assert scaling_tables.crossover(linear, dense) == pytest.approx(700)
  slower = {x: 1e-6 * 9000 * x for x in lengths}
  assert scaling_tables.crossover(slower, dense) is None
  faster = {x: 1e-6 * 100 * x for x in lengths}
  assert scaling_tables.crossover(faster, dense) == 256
  # Faster once by chance is not faster from there on.
  chance = linear | {256: 1e-9}
  assert scaling_tables.crossover(chance, dense) == pytest.approx(700)
  # Only lengths that both have.
  assert scaling_tables.crossover(linear | {4096: 9e9}, dense) == (
    pytest.approx(700)
  )
  assert scaling_tables.crossover({4096: 1.0}, dense) is None


def test_tables():
  lengths = [256, 512, 1024, 2048]
  rows = [row(x, 1e-6 * x**2, temp=x**2 * 2**10) for x in lengths]
  rows += [
    row(x, 7e-4 * x, "linear", temp=x * 2**20, spread=2e-3) for x in lengths
  ]
  rows += [row(x, 2e-6 * x**2, programs.BASELINE) for x in lengths[:-1]]
  rows.append(row(2048, None, programs.BASELINE, reason="not run: too slow"))
  lines = scaling_tables.markdown(rows).splitlines()
  assert (
    "| `linear` |  | 179 ± 2.00 | 358 ± 2.00 | 717 ± 2.00 | 1434 ± 2.00 | 1.00 | 700 |"
    in lines
  )
  assert "| `dense` |  | 65.5 | 262 | 1049 | 4194 | 2.00 |  |" in lines
  assert "| `dense` |  | 0.500 | 0.500 | 0.500 | – |" in lines
  assert (
    "| `linear` |  | 256.0 | 512.0 | 1024.0 | 2048.0 | 1.00 | 1.0 |" in lines
  )
  assert lines[-1] == (
    "- `jax.nn.dot_product_attention`, forward, 2048: not run: too slow"
  )


def run(*arguments):
  """The command, as a user types it."""
  return commands.run_module("benchmarks.scaling", *arguments)


def test_the_command_writes_rows_and_prints_tables(tmp_path):
  out = tmp_path / "scaling.jsonl"
  code, text, error = run(
    "--lengths=32,16",
    "--heads=2",
    "--head_dim=8",
    "--attention=dense",
    f"--out={out}",
  )
  assert code == 0, error
  rows = [json.loads(line) for line in out.read_text().splitlines()]
  assert {x["mechanism"] for x in rows} == {programs.BASELINE, "dense"}
  assert [x["length"] for x in rows] == sorted(x["length"] for x in rows)
  assert text.startswith("B, N, H = 1, 2, 8, float32, cpu, jax ")
  assert "### forward+backward: ms" in text


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("--lengths=16,x", "--lengths: expected whole numbers > 1, got 'x'"),
    ("--lengths=16,16", "--lengths: expected at least one, each once"),
    ("--attention=dens", "--attention: unknown 'dens'; did you mean 'dense'"),
    ("--attention=x", "--attention: expected one of dense, flash, "),
    (
      "--attention=linear/xla",
      "--attention: implementation: linear has no such option",
    ),
    ("--out=/nowhere/rows", "--out: no such folder: '/nowhere'"),
  ],
)
def test_a_fault_is_one_line(argument, message):
  found = run(argument)
  assert commands.fault(found).startswith(message)
  assert found[1] == ""


def test_bounds_tell_pass_from_short_and_what_was_not_run():
  def at(name, part, seconds, mebibytes, causal=False):
    return {
      "mechanism": name,
      "causal": causal,
      "part": part,
      "length": bounds.LENGTH,
      "seconds": seconds,
      "temp_bytes": mebibytes * 2**20,
    }

  rows = [
    at(programs.BASELINE, programs.FORWARD, 1.0, 1024),
    at("flash", programs.FORWARD, 0.379, 24),
    at("flash", programs.TRAINING, None, 51),
    at("performer", programs.FORWARD, 0.056, 5),
    # Another length, and a form whose baseline is not there.
    at("linformer", programs.FORWARD, 0.01, 1) | {"length": 8},
    at("performer", programs.FORWARD, 0.01, 1, causal=True),
  ]
  lines = bounds.markdown(rows).splitlines()
  assert len(lines) == 2 + 2 * len(bounds.BOUNDS)
  flash, flash_both = lines[2:4]
  assert "| forward | 0.379 | 0.38 | pass | 24.0 | 24 | pass |" in flash
  assert "| not run | 0.46 |  | 51.0 | 50 | **short** |" in flash_both
  assert any(
    "| 0.056 | 0.055 | **short** | 5.0 | 5 | pass |" in x for x in lines
  )
  causal = next(
    x for x in lines if x.startswith("| `performer` | ✓ | forward |")
  )
  assert "| not run | 0.085 |  | 1.0 | 5 | pass |" in causal


def test_growth_is_judged_where_it_is_promised():
  rows = [
    row(length, seconds, name, temp)
    for name, times, temps in (
      (programs.BASELINE, (1.0, 16.0), (1, 16)),
      ("flash", (1.0, 16.0), (1, 1)),
      ("lsh", (1.0, 5.3), (10, 40)),
      ("linear", (1.0, None), (10, 50)),
      ("nystrom", (1.0, 4.6), (3, 3)),
      ("mesa", (None, None), (None, None)),  # As where it is not compiled.
    )
    for length, seconds, temp in zip(
      (bounds.LENGTH, bounds.LONGER), times, temps, strict=True
    )
  ]
  rows.append(row(bounds.LENGTH, 1.0, "performer", 1))
  lines = bounds.growth_markdown(rows).splitlines()
  assert lines[2:] == [
    "| `flash` |  | forward | 16.0 | – |  | 1.0 | 4.6 | pass |",
    "| `lsh` |  | forward | 5.3 | 4.6 | **short** | 4.0 | 4.6 | pass |",
    "| `linear` |  | forward | not run | 4.6 |  | 5.0 | 4.6 | **short** |",
    "| `nystrom` |  | forward | 4.6 | 4.6 | pass | 1.0 | 4.6 | pass |",
    "| `mesa` |  | forward | not run | 4.6 |  | not run | 4.6 |  |",
  ]
