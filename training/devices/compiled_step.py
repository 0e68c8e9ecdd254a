"""Compiles the training step of a run for these devices or for a target."""

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
    mesh: axis -> number of devices along it.
    held: what a device stores -> its bytes on one device, and its bytes in total.
    padding: bytes that layouts add: a TPU stores arrays in tiles of 8 × 128.
    temporaries: bytes of temporary arrays on a device; 0 if the compiler refused.
    code: bytes of the program, if it is stored in device memory.
    sent: see `hlo.sent_along`.
    longest_loop: number of iterations of the longest loop of known length, or 0.
    seconds: time of compilation.
    refusal: how much memory is missing, if the compiler refused; else empty.
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
  def together(self) -> int:
    """Bytes that a device needs."""
    return self.kept + self.padding + self.temporaries + self.code

  @property
  def kept(self) -> int:
    """Bytes of `held` on one device."""
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
  sizes = parallel.check_mesh(train, config.model, len(devices)).named
  mesh = parallel.make_mesh(train, devices)
  run = experiment.create(config, check_memory=target is None)
  step = make_step(run.model, run.task, train, mesh)
  batch: Any = run.task.train_batch(0)
  if target:
    where = parallel.batch_shardings(mesh, batch)
    batch = parallel.with_shardings(dict(batch), where)
  else:
    batch = parallel.place_batch(mesh, batch)
  where = parallel.shardings(mesh, run.shapes)
  state = parallel.with_shardings(run.shapes, where)
  parts = {
    "parameters": state.params,
    "optimiser's state": state.opt_state,
    "mean of parameters": state.ema,
    **state.collections,
    "batch": batch,
  }
  held = {
    name: (_bytes(tree, local=True), _bytes(tree))
    for name, tree in parts.items()
    if _bytes(tree)
  }
  found = Step(run, sizes, held)
  start = time.perf_counter()
  try:
    if target:
      program = target_lib.compile_for(step, target, state, batch)
    else:
      program = step.lower(state, batch).compile()
  except jax.errors.JaxRuntimeError as error:
    refused = refusal(str(error))
    if target is None or not refused:
      raise
    return found._replace(refusal=refused)
  memory, text = program.memory_analysis(), program.as_text()
  padding = memory.argument_size_in_bytes - found.kept if target else 0
  return found._replace(
    padding=max(0, padding),
    temporaries=memory.temp_size_in_bytes,
    code=memory.generated_code_size_in_bytes if target else 0,
    sent=hlo.sent_along(text, sizes),
    longest_loop=max(hlo.trips(text), default=0),
    seconds=time.perf_counter() - start,
  )


def refusal(message: str) -> str:
  """Extracts 'needed of available' memory from an out-of-memory error of a TPU compiler.

  Its versions phrase the error in two ways. For any other error, it is empty.
  """
  used = r"Used (\S+) of (\S+) hbm"
  required = r"memory required .*\((\S+)\) exceeds available HBM \((\S+)\)"
  found = re.search(used, message) or re.search(required, message)
  return f"{found[1]} of {found[2]}" if found else ""


def fits(step: Step, target: Target) -> str:
  """Says in one line whether a device has the memory that a step needs."""
  memory = f"{target.memory // 10**9} GB"
  if step.refusal:
    return f"does not fit {memory}: the compiler wants {step.refusal}"
  share = step.together / target.memory
  verdict = "fits" if share <= 1 else "does not fit"
  return f"{verdict} {memory}: {step.together / 1e9:.2f} GB, {share:.0%}"


def _bytes(tree: Any, local: bool = False) -> int:
  """Bytes of the arrays or sharded shapes of a tree, in total or on one device."""
  return sum(
    leaf.dtype.itemsize
    * math.prod(leaf.sharding.shard_shape(leaf.shape) if local else leaf.shape)
    for leaf in jax.tree.leaves(tree)
  )
