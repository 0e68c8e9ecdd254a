"""What is read of a compiled program, and laws of the programs for an H100."""

import os
import pathlib
import subprocess

import pytest

from training.devices import hlo

ROOT = pathlib.Path(__file__).parents[2]
DEVICES = ROOT / ".venv-devices"

PROGRAM = """ENTRY %main (x: f32[8]) -> f32[8] {
  %while.3 = (s32[], f32[8]) while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"16"}}
  %while.4 = (s32[], f32[8]) while(%t), condition=%c, body=%b, backend_config={"known_trip_count":{"n":"120"}}
  %reduce-window.1 = f32[4,64]{1,0} reduce-window(%x, %zero), window={size=1x32 pad=0_0x31_0}, to_apply=%add
  %conditional.1 = f32[8]{0} conditional(%p, %a, %b), branch_computations={%x, %y}
  %scatter.1 = bf16[8,4]{1,0} scatter(%o, %i, %u), update_window_dims={1}, to_apply=%add
  %scatter.2 = bf16[8,4]{1,0} scatter(%o, %i, %u), update_window_dims={1}, unique_indices=true, to_apply=%add
  %scatter.3 = f32[8,4]{1,0} scatter(%o, %i, %u), update_window_dims={1}, to_apply=%add
  ROOT %sort.1 = (f32[8]{0}, s32[8]{0}) sort(%x, %y), dimensions={0}
}
"""


def test_counts_of_a_program():
  assert hlo.counts(PROGRAM) == {
    "trips": 120,
    "conditionals": 1,
    "scatters": 3,
    "repeated": 1,
    "sorts": 1,
    "window": 32,
  }


@pytest.mark.thorough
@pytest.mark.parametrize(
  "name",
  [
    "stick_breaking",
    "path",
    "moba",
    "nsa",
    "dsa",
    "gated_delta",
    "window_linear",
  ],
)
def test_programs_for_an_h100(name):
  _need_compilers()
  arguments = f"COMPILED=--length=4096 --attention={name}"
  table = _printed("make", "-s", "compiled", arguments)
  rows = [x.strip("| ").split(" | ") for x in table.splitlines()[4:]]
  assert len(rows) == 2, table
  for _, program, _, _, trips, conditionals, scatters, _, window, *_ in rows:
    scatters, repeated = scatters.strip(")").split(" (")
    assert int(trips.replace(",", "")) <= 64, program
    assert conditionals == repeated == "0", program
    assert int(scatters) <= 1, program
    assert int(window) <= 64, program


@pytest.mark.thorough
def test_the_widest_state_compiles_for_a_tpu():
  """Prefixes of 256 chunks, fused with what made them, aborted its compiler."""
  _need_compilers()
  arguments = "COMPILED=--target=v5e --attention=performer"
  table = _printed("make", "-s", "compiled", arguments)
  assert table.count("\n| `performer` |") == 2, table


@pytest.mark.thorough
@pytest.mark.parametrize(
  "name", ["flash", "sliding_window", "retention", "delta"]
)
def test_one_more_layer_keeps_its_input_alone(name):
  _need_compilers()
  python = DEVICES / "bin" / "python"
  line = _printed(python, "-m", "tests.benchmarks.layers", name)
  _, more, kept = line.split()
  # Zeros of later layers, made as the program began, were 4 to 8 times as much.
  assert int(more) < 1.5 * int(kept), line


def _printed(*command):
  # Flags of the tests' JAX, which is another, would end the program.
  return subprocess.run(
    command,
    cwd=ROOT,
    env={**os.environ, "XLA_FLAGS": ""},
    capture_output=True,
    text=True,
    check=True,
  ).stdout


def _need_compilers():
  if not (DEVICES / ".installed").exists():
    pytest.skip("needs `make compiled`, which sets up .venv-devices")
