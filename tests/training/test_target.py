"""Steps compiled for devices that are not here, and what is refused before."""

import os
import pathlib
import re
import subprocess

import jax
import jax.numpy as jnp
import pytest

from attention.platform import backend
from settings.errors import ConfigError
from tests import commands
from training.devices import compiled_step, target

ROOT = pathlib.Path(__file__).parents[2]
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.mark.parametrize(
  ("name", "message"),
  [
    ("a100:8", "^--target: expected h100:8, .* or v5e:4x4, got 'a100:8'$"),
    ("h100:0", "got 'h100:0'$"),
    ("v5e:16", "got 'v5e:16'$"),
    ("h100:12", "^--target: expected at most 8 or a multiple of 8 GPUs, got "),
  ],
)
def test_targets_that_there_are_not(name, message):
  with pytest.raises(ConfigError, match=message):
    target.find(name)


@pytest.mark.parametrize(
  ("name", "devices", "expected"),
  [
    ("h100", ("cuda", "", "1x1x1"), ("gpu", "cuda", 80 * 10**9)),
    ("h100:5", ("cuda", "", "1x5x1"), ("gpu", "cuda", 80 * 10**9)),
    ("h100:8", ("cuda", "", "1x8x1"), ("gpu", "cuda", 80 * 10**9)),
    ("h100:24", ("cuda", "", "3x8x1"), ("gpu", "cuda", 80 * 10**9)),
    ("v5e:2x10", ("tpu", "v5e:2x10", None), ("tpu", "tpu", 16 * 10**9)),
  ],
)
def test_targets_of_each_size(monkeypatch, name, devices, expected):
  def described(_, compiler, layout, topology=None, **unused):
    return compiler, layout, topology

  monkeypatch.setattr(target, "_devices", described)
  assert target.find(name) == (devices, *expected)


def test_a_command_says_what_it_needs():
  """With the packages of the project alone, and with what contradicts a target."""
  command = "training.commands.describe", *commands.TINY
  line = commands.fault(commands.run_module(*command, "--target=h100:8"))
  assert "needs packages that are not installed here; `make describe`" in line
  line = commands.fault(
    commands.run_module(*command, "--target=h100:8", "--devices=8")
  )
  assert line.startswith("--devices: expected none with --target")


def test_a_program_is_that_of_the_target(monkeypatch):
  """Traced and lowered for a GPU; only XLA's compiler for it is not here."""
  monkeypatch.setattr(jax.stages.Lowered, "compile", jax.stages.Lowered.as_text)
  machine, platforms = target.Target((), "gpu", "cuda", 80 * 10**9), []

  def function(x):
    platforms.append(backend.name())
    return jax.lax.platform_dependent(x, cpu=jnp.sin, cuda=jnp.cos)

  text = target.compile_for(jax.jit(function), machine, jnp.zeros(3))
  assert "stablehlo.cosine" in text
  assert "stablehlo.sine" not in text
  assert platforms == ["gpu"]


def test_whether_a_step_fits():
  machine = target.Target((), "gpu", "cuda", 80 * 10**9)
  held = {"parameters": (15 * 10**9, 120 * 10**9)}
  step = compiled_step.Step(None, {}, held, temporaries=45 * 10**9)
  assert compiled_step.fits(step, machine) == "fits 80 GB: 60.00 GB, 75%"
  full = step._replace(padding=15 * 10**9, code=5 * 10**9)
  assert compiled_step.fits(full, machine) == "fits 80 GB: 80.00 GB, 100%"
  larger = step._replace(temporaries=69 * 10**9)
  told = compiled_step.fits(larger, machine)
  assert told == "does not fit 80 GB: 84.00 GB, 105%"
  # As libtpu 0.0.52 and versions before it say it.
  for message in (
    "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required "
    "for HLO temporaries (16.26G) exceeds available HBM (15.75G). HLO module: f.",
    "Ran out of memory in memory space hbm. Used 16.26G of 15.75G hbm. Exceeded hbm",
  ):
    refused = step._replace(refusal=compiled_step.refusal(message))
    told = compiled_step.fits(refused, machine._replace(memory=16 * 10**9))
    assert told == "does not fit 16 GB: the compiler needs 16.26G of 15.75G"
  assert not compiled_step.refusal("INTERNAL: Mosaic failed to compile")


def description(attention, *arguments, **leaves):
  """What `make describe` prints of configs/copy.py; skips where it is not set up."""
  if not (ROOT / ".venv-devices" / ".installed").exists():
    pytest.skip("needs `make describe`, which sets up .venv-devices")
  words = f"--config=configs/copy.py:{attention}", *commands.flags(leaves)
  shown = subprocess.run(
    ["make", "-s", "describe", f"DESCRIBE={' '.join([*words, *arguments])}"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    env={x: y for x, y in os.environ.items() if x != "XLA_FLAGS"},
  )
  assert shown.returncode == 0, shown.stderr
  return shown.stdout


@pytest.mark.thorough
def test_gates_add_no_sum_of_gradients_along_tensor():
  """Where each read its own copy of the inputs, a step sent 1.13 times as much."""
  model = {"num_layers": 1, "features": 256, "dtype": "bfloat16"}
  sent = {}
  for name in ("dense", "gated_delta"):
    leaves = {"model": model, "mesh": {"tensor": 4}, "batch_size": 8}
    shown = description(name, "--target=h100:4", **leaves)
    row = r"^\| all-reduce \| tensor \| \d+ \| (.*) (.*) \|$"
    ((size, unit),) = re.findall(row, shown, re.M)
    sent[name] = float(size) * UNITS[unit]
  assert sent["gated_delta"] < 1.05 * sent["dense"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["h100:8", "v5e:2x4"])
def test_a_step_for_devices_that_are_not_here(name):
  """Parameters are gathered once, and their gradients scattered and not whole."""
  size = {"num_layers": 1, "features": 256, "mlp_features": 1024}
  leaves = {"model": size, "mesh": {"fsdp": 8}, "batch_size": 8}
  shown = description("dense", f"--target={name}", **leaves)
  assert "mesh: data 1 × fsdp 8 × tensor 1 × sequence 1" in shown
  assert re.search(r"^fits \d+ GB: 0\.\d+ GB, \d%$", shown, re.M), shown
  assert re.search(
    r"^longest loop of known length: (\d+ iterations|–)$", shown, re.M
  )
  (parameters,) = re.findall(
    r"^\| parameters \| .* \| (.*) (.*) \|$", shown, re.M
  )
  sent = re.findall(
    r"^\| ([a-z-]+) \| fsdp \| \d+ \| (.*) (.*) \|$", shown, re.M
  )
  sizes = {kind: float(size) * UNITS[unit] for kind, size, unit in sent}
  once = float(parameters[0]) * UNITS[parameters[1]] * 7 / 8
  # A TPU takes half the bytes: products there read bfloat16.
  assert 0.4 * once < sizes["all-gather"] < 1.1 * once
  assert 0.4 * once < sizes["reduce-scatter"] + sizes["all-reduce"] < 1.2 * once
