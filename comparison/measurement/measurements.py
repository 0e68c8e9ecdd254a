"""All measurements of one run."""

from collections.abc import Callable, Mapping
from pathlib import Path
import statistics
from typing import Any

import jax
import numpy as np

from comparison.measurement import approximation, costs, usage
from settings.errors import one_line
from training import experiment, experiment_config, metrics, workdir
from training.devices import process
from training.inference import generation
from training.pictures import attention_maps


def measure_trained(
  folder: Path, *, with_map: bool, shape: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Measures a trained run.

  Args:
    folder: folder of the run.
    with_map: whether to compute the attention map of one held-out example.
    shape: the costs of a run that differs only in seed and learning rate, which are
      the same; None measures them.

  Returns:
    Maps names to values. A value that cannot be measured is None, and 'notes' has the
    reason.

  Raises:
    ConfigError: the folder has no run, or the run has no intact checkpoint.
  """
  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  run = experiment.create(config, folder)
  variables = generation.restore_variables(run, folder)
  held_out = next(iter(run.task.eval_batches(run.task.eval_splits[0])))
  results = dict(shape or _costs(run, variables, held_out))
  notes = results["notes"] = dict(results["notes"])
  # These speeds include the input pipeline.
  speeds = [line.get("tokens_per_second") for line in metrics.read(folder)]
  speeds = [speed for speed in speeds if speed is not None]
  results["tokens_per_second"] = (
    statistics.median_high(speeds) if speeds else None
  )
  results["approximation_error"] = _attempt(
    notes,
    "approximation_error",
    lambda: _approximation_error(run.model, variables, held_out),
  )
  results["map"] = None
  if with_map:
    results["map"] = attention_maps.sketch(run.model, variables, run.task)
  return results | {"jax": jax.__version__, "device": process.devices()}


def step_cost(run: experiment.Experiment) -> dict[str, Any]:
  """Time and memory of one update of a run, as in `costs.step_cost`."""
  batch = run.task.train_batch(0)
  return costs.step_cost(
    run.model, run.task, run.config.train, run.init(), batch
  )


def _costs(
  run: experiment.Experiment,
  variables: Mapping[str, Any],
  held_out: Mapping[str, Any],
) -> dict[str, Any]:
  """The costs, which depend only on the shapes of a run."""
  notes: dict[str, str] = {}
  meter = usage.Meter()
  results = step_cost(run)
  batch = run.task.train_batch(0)
  for name, count in (
    ("train_flops", costs.step_flops(run, batch)),
    ("forward_flops", costs.forward_flops(run, batch)),
  ):
    results[name] = count.flops
    if count.uncounted:
      notes[name] = "at least; not counted: " + "; ".join(count.uncounted)
  decoding = _attempt(
    notes,
    "decode_tokens_per_second",
    lambda: costs.decode_cost(run, variables, held_out),
  )
  results |= decoding or {"decode_tokens_per_second": None, "cache_bytes": None}
  results["measured_others_cores"] = meter.others_cores()
  results["test_rows"] = _num_rows(run.task)
  return {**results, "notes": notes}


def _num_rows(task: Any) -> int:
  """The number of rows of the last held-out split, without padding rows."""
  rows = 0
  for batch in task.eval_batches(task.eval_splits[-1]):
    weights = batch.get("weights")
    if weights is None:
      rows += len(next(iter(batch.values())))
    else:
      rows += int(np.any(weights > 0, axis=tuple(range(1, weights.ndim))).sum())
  return rows


def _attempt(
  notes: dict[str, str], name: str, measure: Callable[[], Any]
) -> Any:
  """Measures a value; on an error, adds a note and returns None."""
  try:
    return measure()
  except (ValueError, NotImplementedError) as error:
    notes[name] = one_line(error)
    return None


def _approximation_error(model, variables, batch) -> float:
  error = approximation.error(model, variables, batch)
  if error is None:
    raise ValueError("this mechanism is not an approximation")
  return error
