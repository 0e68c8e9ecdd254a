"""Everything that is measured of one run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from comparison import approximation, costs
from comparison.usage import Meter
import models
from settings.errors import ConfigError, one_line
from training import (
  attention_maps,
  experiment,
  experiment_config,
  inference,
  metrics,
  workdir,
)


def trained(
  folder: Path, *, with_map: bool, shape: Mapping[str, Any] | None = None
) -> dict[str, Any]:
  """Everything that is measured of a trained run.

  Args:
    folder: of the run.
    with_map: take the attention map of one held-out example as well.
    shape: `of_shape` of a run that differs in seed and learning rate alone;
      default measures it.

  Returns:
    name -> value; None where there is none, its reason in 'notes'.

  Raises:
    ConfigError: there is no such run, or it has no intact checkpoint.
  """
  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  run = experiment.create(config, folder)
  variables = inference.restore_variables(run, folder)
  held_out = next(iter(run.task.eval_batches(run.task.eval_splits[0])))
  found = dict(of_shape(run, variables) if shape is None else shape)
  notes = dict(found["notes"])
  found["tokens_per_second"] = _tokens_per_second(folder)
  found["approximation_error"] = _attempt(
    notes,
    "approximation_error",
    lambda: _approximation_error(run.model, variables, held_out),
  )
  found["map"] = None
  if with_map:
    found["map"] = attention_maps.sketch(run.model, variables, run.task)
  return {**found, "jax": jax.__version__, "device": _device(), "notes": notes}


def of_shape(
  run: experiment.Experiment, variables: Mapping[str, Any]
) -> dict[str, Any]:
  """What a run costs, which follows from its shape and not from its numbers.

  Args:
    run: the experiment.
    variables: of its model.

  Returns:
    name -> value, with the reasons of what there is not in 'notes'.
  """
  batch = run.task.train_batch(0)
  held_out = next(iter(run.task.eval_batches(run.task.eval_splits[0])))
  notes: dict[str, str] = {}
  meter = Meter()
  found = step_cost(run, batch)
  for name, account in (
    ("train_flops", costs.step_flops(run, batch)),
    ("forward_flops", costs.forward_flops(run, batch)),
  ):
    found[name] = account.flops
    if account.uncounted:
      notes[name] = "at least; not counted: " + "; ".join(account.uncounted)
  decoding = _attempt(
    notes,
    "decode_tokens_per_second",
    lambda: costs.decode_cost(run, variables, held_out),
  )
  found |= decoding or {"decode_tokens_per_second": None, "cache_bytes": None}
  found["measured_others_cores"] = meter.others_cores()
  return {**found, "notes": notes}


def _attempt(
  notes: dict[str, str], name: str, measure: Callable[[], Any]
) -> Any:
  """What cannot be is a note; everything else is measured all the same."""
  try:
    return measure()
  except (ValueError, NotImplementedError) as error:
    notes[name] = one_line(error)
    return None


def step_cost(run: experiment.Experiment, batch: Any) -> dict[str, Any]:
  """Time and memory of one update, as `costs.step_cost`.

  Raises:
    ConfigError: memory is too small for a step.
  """
  kind = run.config.train.parallel
  try:
    return costs.step_cost(run.functions, run.init(), batch, kind)
  except ValueError as error:
    raise ConfigError(one_line(error)) from error


def _tokens_per_second(folder: Path) -> float | None:
  """Median over the lines of training: the pipeline is in it."""
  speeds = sorted(
    record["tokens_per_second"]
    for record in metrics.read(folder)
    if "tokens_per_second" in record
  )
  return speeds[len(speeds) // 2] if speeds else None


def _approximation_error(model, variables, batch) -> float:
  if isinstance(model.config, models.Seq2SeqConfig):
    raise ValueError("a recurrent model has no dense counterpart")
  error = approximation.error(model, variables, batch)
  if error is None:
    raise ValueError("its scores are its own: it approximates nothing")
  return error


def _device() -> str:
  return f"{jax.device_count()} × {jax.devices()[0].device_kind}"
