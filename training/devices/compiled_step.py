"""Compiles the training step of a run for the devices of JAX or of a target."""

from collections.abc import Mapping
import math
import re
import time
from typing import Any, NamedTuple

import jax

from settings.errors import ConfigError
from training import experiment
from training.devices import hlo, parallel
from training.devices import target as target_lib
from training.devices.target import Target
from training.experiment_config import ExperimentConfig
from training.step import make_step


class Step(NamedTuple):
  """A compiled training step.

  Attributes:
    run: the run that it trains.
    mesh: maps axes to the numbers of devices along them.
    held: maps what devices store to its bytes on one device, and its bytes in total.
    padding: bytes that layouts add, as a TPU stores arrays in tiles of 8 × 128.
    temporaries: bytes of temporary arrays on a device; 0 if the compiler refused.
    code: bytes of the program, if it is stored in device memory.
    sent: see `hlo.sent_along`.
    longest_loop: number of iterations of the longest loop of known length, or 0.
    seconds: time of compilation.
    refusal: the missing memory, if the compiler refused; otherwise empty.
  """

  run: experiment.Experiment
  mesh: Mapping[str, int]
  held: Mapping[str, tuple[int, int]]
  padding: int = 0
  temporaries: int = 0
  code: int = 0
  sent: Mapping[tuple[str, str], tuple[int, float]] = {}
  longest_loop: int = 0
  seconds: float = 0.0
  refusal: str = ""

  @property
  def total(self) -> int:
    """The bytes that a device needs."""
    return self.held_bytes + self.padding + self.temporaries + self.code

  @property
  def held_bytes(self) -> int:
    """The bytes of `held` on one device."""
    return sum(local for local, _ in self.held.values())


def compile_step(
  config: ExperimentConfig, target: Target | None = None
) -> Step:
  """Compiles the training step of a run for the devices of JAX or of a target.

  Raises:
    ConfigError: the mesh does not fit the devices; or as in `experiment.create`.
  """
  train = config.train
  if target and train.parallel != "jit":
    raise ConfigError(
      f"--target: expected config.parallel=jit, got {train.parallel!r}"
    )
  devices = target.devices if target else tuple(jax.devices())
  sizes = parallel.check_mesh(train, config.model, len(devices)).axis_sizes
  mesh = parallel.make_mesh(train, devices)
  run = experiment.create(config, check_memory=target is None)
  step = make_step(run.model, run.task, train, mesh)
  batch: Any = run.task.train_batch(0)
  if target:
    shardings = parallel.batch_shardings(mesh, batch)
    batch = parallel.with_shardings(dict(batch), shardings)
  else:
    batch = parallel.place_batch(mesh, batch)
  shardings = parallel.shardings(mesh, run.shapes)
  state = parallel.with_shardings(run.shapes, shardings)
  trees = {
    "parameters": state.params,
    "optimiser's state": state.opt_state,
    "mean of parameters": state.ema,
    **state.collections,
    "batch": batch,
  }
  held = {
    name: (_bytes(tree, local=True), _bytes(tree))
    for name, tree in trees.items()
    if _bytes(tree)
  }
  compiled = Step(run, sizes, held)
  start = time.perf_counter()
  try:
    if target:
      program = target_lib.compile_for(step, target, state, batch)
    else:
      program = step.lower(state, batch).compile()
  except jax.errors.JaxRuntimeError as error:
    reason = refusal(str(error))
    if target is None or not reason:
      raise
    return compiled._replace(refusal=reason)
  memory, text = program.memory_analysis(), program.as_text()
  padding = 0
  if target:
    padding = memory.argument_size_in_bytes - compiled.held_bytes
  return compiled._replace(
    padding=max(0, padding),
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes if target else 0,
    sent=hlo.sent_along(text, sizes),
    longest_loop=max(hlo.trips(text), default=0),
    seconds=time.perf_counter() - start,
  )


def refusal(message: str) -> str:
  """Extracts '12G of 16G' from an out-of-memory error of a TPU compiler.

  Versions of the compiler phrase the error in two ways. The result is empty for any
  other error.
  """
  used = r"Used (\S+) of (\S+) hbm"
  required = r"memory required .*\((\S+)\) exceeds available HBM \((\S+)\)"
  match = re.search(used, message) or re.search(required, message)
  return f"{match[1]} of {match[2]}" if match else ""


def fits(step: Step, target: Target) -> str:
  """Says in one line whether a device has the memory that a step needs."""
  memory = f"{target.memory // 10**9} GB"
  if step.refusal:
    return f"does not fit {memory}: the compiler needs {step.refusal}"
  fraction = step.total / target.memory
  verdict = "fits" if fraction <= 1 else "does not fit"
  return f"{verdict} {memory}: {step.total / 1e9:.2f} GB, {fraction:.0%}"


def _bytes(tree: Any, local: bool = False) -> int:
  """Returns the bytes of arrays or sharded shapes, in total or on one device."""
  return sum(
    leaf.dtype.itemsize
    * math.prod(leaf.sharding.shard_shape(leaf.shape) if local else leaf.shape)
    for leaf in jax.tree.leaves(tree)
  )
