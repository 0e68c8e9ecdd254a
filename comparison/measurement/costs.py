"""The costs of a training step, a forward pass and decoding."""

from collections.abc import Mapping
import dataclasses
import functools
import time
from typing import Any, cast

import jax
import numpy as np

import models
from models.transformer import Transformer
from training.config import TrainConfig
from training.devices import flops, parallel
from training.devices.mesh import AXES, MeshConfig
from training.experiment import Experiment
from training.state import TrainState
from training.step import make_step

Batch = Mapping[str, Any]

_TIMED_STEPS, _TIMED_SECONDS = 50, 10.0
_DECODED_ROWS = 16


def step_flops(run: Experiment, batch: Batch) -> flops.FlopCount:
  """Floating-point operations of one update, counted without compilation."""
  train = dataclasses.replace(
    run.config.train, parallel="jit", mesh=MeshConfig()
  )
  # An abstract mesh, because a process that plans runs must not occupy devices.
  mesh = jax.sharding.AbstractMesh(
    (1,) * len(AXES), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES)
  )
  step = make_step(run.model, run.task, train, cast(Any, mesh))
  return flops.count(step, run.shapes, dict(batch))


def forward_flops(run: Experiment, batch: Batch) -> flops.FlopCount:
  """Floating-point operations of the logits of one batch."""
  return flops.count(
    functools.partial(models.forward, cast(Any, run.model)),
    jax.eval_shape(lambda state: state.variables, run.shapes),
    dict(batch),
  )


def step_cost(
  model: Any, task: Any, config: TrainConfig, state: TrainState, batch: Batch
) -> dict[str, Any]:
  """Time and memory of one update, as in the training loop.

  The time is the median of up to 50 steps or 10 seconds, but at least 3 steps, after
  one warm-up step. Each step is synchronised.

  Returns:
    'compile_seconds' (with tracing, without the cache on disk); 'step_seconds';
    'temp_bytes', which XLA reserves in addition to arguments and results; and
    'device_peak_bytes', which is None if the device does not report it.
  """
  mesh = parallel.make_mesh(config)
  step = make_step(model, task, config, mesh)
  state = parallel.place_state(mesh, state)
  rows = parallel.place_batch(mesh, dict(batch))
  start = time.perf_counter()
  compiled = step.lower(state, rows).compile()
  compile_seconds = time.perf_counter() - start
  temp_bytes = compiled.memory_analysis().temp_size_in_bytes
  seconds = []
  while len(seconds) < 4 or (
    len(seconds) <= _TIMED_STEPS and sum(seconds) < _TIMED_SECONDS
  ):
    start = time.perf_counter()
    state, metrics = compiled(state, rows)
    jax.block_until_ready((state, metrics))
    seconds.append(time.perf_counter() - start)
  statistics = jax.local_devices()[0].memory_stats() or {}
  return {
    "compile_seconds": compile_seconds,
    "step_seconds": float(np.median(seconds[1:])),
    "temp_bytes": temp_bytes,
    "device_peak_bytes": statistics.get("peak_bytes_in_use"),
  }


def decode_cost(
  run: Experiment, variables: Mapping[str, Any], batch: Batch
) -> dict[str, Any]:
  """The speed of decoding up to the maximum length, and the size of the cache.

  No sequence ends early, so the time does not depend on the model's outputs. The
  encoder, if there is one, runs once and is part of the time.

  Returns:
    'decode_tokens_per_second' for 16 rows, whose sources are those of `batch`, and
    `cache_bytes` for one row.

  Raises:
    ValueError: the model cannot decode.
  """
  task, length, rows = run.task, run.task.max_target_length, _DECODED_ROWS
  inputs = {"prompt": np.full((rows, 1), task.bos_id, np.int32)}
  if "source" in batch:
    source = batch["source"]
    inputs = {"source": np.resize(source, (rows, source.shape[1]))}
  decode = functools.partial(
    models.generate,
    cast(Any, run.model),
    variables,
    **cast(Any, inputs),
    max_length=length,
    bos_id=task.bos_id,
    eos_id=-1,
    pad_id=task.pad_id,
  )
  jax.block_until_ready(decode())
  seconds = []
  for _ in range(3):
    start = time.perf_counter()
    jax.block_until_ready(decode())
    seconds.append(time.perf_counter() - start)
  return {
    "decode_tokens_per_second": rows * length / float(np.median(seconds)),
    "cache_bytes": cache_bytes(run.model, length),
  }


def cache_bytes(model: Any, length: int) -> int | None:
  """Bytes of the cache of decoder self-attention for one sequence, over all layers.

  The cache has keys and values or a state, and inputs of short convolutions. Keys and
  values of a source do not count. None for a recurrent model, whose state does not
  belong to a mechanism.
  """
  if not isinstance(model, Transformer):
    return None
  start = functools.partial(
    model.init, jax.random.key(0), None, 1, length, method="start"
  )
  caches = dict(jax.eval_shape(start)["cache"])
  del caches["index"]
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(caches))
