r"""What a device holds of a run, before it is started.

    python -m training.describe --config=configs/gpt.py --config.task.path=input.txt
    python -m training.describe --config=configs/copy.py --devices=8 \
      --config.mesh.fsdp=4 --config.mesh.tensor=2
    make describe DESCRIBE="--config=configs/copy.py --target=h100:8 --config.mesh.fsdp=8"

Compiles the run's own training step and prints bytes a device, as a table: the
parameters and the optimiser's state by what lies where, the batch, and what XLA
reserves for activations, gradients and temporaries. A second table has the bytes
that a device sends in a step, by axes of the mesh, each loop counted as often as it
runs; below stands how often the longest loop does. Nothing is trained or written.

--devices simulates that many devices on a CPU. --target compiles for GPUs or TPUs
that are not here, and says whether they have the memory: h100:8 is eight H100,
h100:16 two hosts of eight, v5e:4x4 sixteen TPUs. It wants packages that
`make describe` installs. cuDNN's kernel is not in such a program: the library asks
a GPU for it, and there is none.
"""

from collections.abc import Mapping
import math
import re
import time
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

from settings.errors import ConfigError
from training import (
  config_flag,
  entry,
  experiment,
  experiment_config,
  hlo,
  parallel,
)
from training import target as target_lib
from training.experiment_config import ExperimentConfig
from training.target import Target

_CONFIG = config_flag.define("FILE.py or FILE.py:MECHANISM, as for train.py")
_DEVICES = flags.DEFINE_integer(
  "devices", None, "devices to simulate on a CPU", lower_bound=1
)
_TARGET = flags.DEFINE_string(
  "target", None, f"devices that are not here: {target_lib.EXPECTED}"
)


class Step(NamedTuple):
  """A compiled training step.

  Attributes:
    run: what it is of.
    mesh: axis -> devices along it.
    held: what a device keeps -> its bytes there, and those of the whole.
    temporaries: bytes of a device; of a program that its compiler refuses, 0.
    code: bytes of the program, where it lies in the memory of a device.
    sent: see `hlo.sent_along`.
    longest_loop: how often it runs.
    seconds: of compiling.
    refusal: why there is no such program, for want of memory; else empty.
  """

  run: experiment.Experiment
  mesh: Mapping[str, int]
  held: Mapping[str, tuple[int, int]]
  temporaries: int = 0
  code: int = 0
  sent: Mapping[tuple[str, str], tuple[int, float]] = {}
  longest_loop: int = 0
  seconds: float = 0.0
  refusal: str = ""

  @property
  def together(self) -> int:
    """Bytes that a device needs."""
    held = sum(local for local, _ in self.held.values())
    return held + self.temporaries + self.code


def main() -> None:
  """From the config to the table."""
  _, mapping = entry.load_config(_CONFIG)
  target = None
  if _TARGET.value is not None:
    if _DEVICES.value is not None:
      raise ConfigError(
        "--devices: expected none with --target, which has its own"
      )
    target = target_lib.find(_TARGET.value)
  if _DEVICES.value is not None:
    try:
      jax.config.update("jax_platforms", "cpu")
      jax.config.update("jax_num_cpu_devices", _DEVICES.value)
    except RuntimeError as error:
      raise ConfigError(f"--devices: {error}") from error
  step = compiled(experiment_config.parse(mapping), target)
  print(experiment.describe(step.run, target.devices if target else ()))
  sizes = " × ".join(f"{name} {size}" for name, size in step.mesh.items())
  print(f"mesh: {sizes}\n")
  print("| | a device | the whole |\n| --- | --: | --: |")
  for name, (local, whole) in step.held.items():
    print(f"| {name} | {_readable(local)} | {_readable(whole)} |")
  for name, size in (
    ("activations, gradients, temporaries", step.temporaries),
    ("the program", step.code),
  ):
    if size:
      print(f"| {name} | {_readable(size)} | – |")
  print(f"| together | {_readable(step.together)} | |")
  if target:
    print(f"\n{fits(step, target)}")
  if step.refusal:
    return
  print("\n| in a step, a device sends by | along | operations | |")
  print("| --- | --- | --: | --: |")
  for (axes, kind), (count, size) in step.sent.items():
    print(f"| {kind} | {axes} | {count:,} | {_readable(size)} |")
  if not step.sent:
    print("| nothing | | | |")
  print(f"\nlongest loop: {step.longest_loop:,} steps")


def compiled(config: ExperimentConfig, target: Target | None = None) -> Step:
  """The training step of a run, for the devices of JAX or those of a target.

  Raises:
    ConfigError: the mesh does not fit the devices, or as `experiment.create`.
  """
  train = config.train
  if target and train.parallel != "jit":
    raise ConfigError(
      f"--target: expected config.parallel=jit, got {train.parallel!r}"
    )
  devices = target.devices if target else tuple(jax.devices())
  mesh = parallel.check_mesh(train, config.model, len(devices))
  run = experiment.create(config, here=target is None)
  made = parallel.make(run.functions, train.parallel, mesh, devices=devices)
  rows = run.task.train_batch(0)
  batch = made.batch_shapes(rows) if target else made.place_batch(rows)
  state = made.placed_shapes(run.shapes)
  parts = {
    "parameters": state.params,
    "optimiser's state": state.opt_state,
    **state.collections,
    "batch": batch,
  }
  held = {
    name: (_bytes(tree, local=True), _bytes(tree))
    for name, tree in parts.items()
    if _bytes(tree)
  }
  step = Step(run, mesh.named, held)
  arguments = run.numbers, state, batch, np.int32(0)
  start = time.perf_counter()
  try:
    if target:
      program = target_lib.compiled(made.train, target, *arguments)
    else:
      program = made.train.lower(*arguments).compile()
  except jax.errors.JaxRuntimeError as error:
    refusal = re.search(r"Used \S+ of \S+ hbm", str(error))
    if target is None or refusal is None:
      raise
    return step._replace(refusal=refusal[0])
  memory, text = program.memory_analysis(), program.as_text()
  return step._replace(
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes if target else 0,
    sent=hlo.sent_along(text, mesh.named),
    longest_loop=max(hlo.trips(text), default=0),
    seconds=time.perf_counter() - start,
  )


def fits(step: Step, target: Target) -> str:
  """Whether a device has the memory that a step needs, in one line."""
  memory = f"{target.memory // 10**9} GB"
  if step.refusal:
    return f"does not fit {memory}: the compiler says, {step.refusal}"
  share = step.together / target.memory
  verdict = "fits" if share <= 1 else "does not fit"
  return f"{verdict} {memory}: {step.together / 1e9:.2f} GB, {share:.0%}"


def _bytes(tree: Any, local: bool = False) -> int:
  """Of the arrays or placed shapes of a tree, or of one device's parts of them."""
  return sum(
    leaf.dtype.itemsize
    * math.prod(leaf.sharding.shard_shape(leaf.shape) if local else leaf.shape)
    for leaf in jax.tree.leaves(tree)
  )


def _readable(count: float) -> str:
  for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
    if count >= size:
      return f"{count / size:.2f} {unit}"
  return f"{count:.0f} B"


if __name__ == "__main__":
  entry.run(main)
