"""Measures one run in a process of its own, so that its memory is its own.

    python -m comparison.measure --workdir=RUN --out=FILE
    python -m comparison.measure --config=configs/copy.py:lsh --out=FILE

The first measures a trained run, the second times the step of one that is still
to be made: a budget of seconds becomes a number of steps. Both write JSON.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from absl import flags
import jax

from comparison import approximation, costs
import models
from process import claimed, config_flag, entry, host_load, host_memory
from process.errors import ConfigError, one_line
from training import (
  attention_maps,
  experiment,
  experiment_config,
  inference,
  metrics,
  workdir,
)

_CONFIG = config_flag.define("as for train.py")
_WORKDIR = flags.DEFINE_string("workdir", None, "folder of a trained run")
_MAP = flags.DEFINE_bool("map", False, "attention map of one example as well")
_OUT = flags.DEFINE_string("out", None, "a .json file", required=True)


def main() -> None:
  """Writes what was measured, whole or not at all."""
  host_memory.keep_freed()  # As in training.
  if _WORKDIR.value is None:
    _, mapping = entry.load_config(_CONFIG)
    run = experiment.create(experiment_config.parse(mapping))
    found = _step_cost(run, run.task.train_batch(0))
  else:
    found = trained(Path(_WORKDIR.value), with_map=_MAP.value)
  claimed.replace(Path(_OUT.value), found)


def trained(folder: Path, *, with_map: bool) -> dict[str, Any]:
  """Everything that is measured of a trained run.

  Args:
    folder: of the run.
    with_map: take the attention map of one held-out example as well.

  Returns:
    name -> value; None where there is none, its reason in 'notes'.

  Raises:
    ConfigError: there is no such run, or it has no intact checkpoint.
  """
  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  run = experiment.create(config, folder)
  variables = inference.restore_variables(run, folder)
  batch = run.task.train_batch(0)
  held_out = next(iter(run.task.eval_batches(run.task.eval_splits[0])))
  notes = {}

  def attempt(name: str, measure: Callable[[], Any]) -> Any:
    """What cannot be is a note; everything else is measured all the same."""
    try:
      return measure()
    except (ValueError, NotImplementedError) as error:
      notes[name] = one_line(error)
      return None

  others = host_load.Others()
  found = _step_cost(run, batch)
  found["tokens_per_second"] = _tokens_per_second(folder)
  for name, account in (
    ("train_flops", costs.step_flops(run, batch)),
    ("forward_flops", costs.forward_flops(run, batch)),
  ):
    found[name] = account.flops
    if account.uncounted:
      notes[name] = "at least; not counted: " + "; ".join(account.uncounted)
  decoding = attempt(
    "decode_tokens_per_second",
    lambda: costs.decode_cost(run, variables, held_out),
  )
  found |= decoding or {"decode_tokens_per_second": None, "cache_bytes": None}
  found["approximation_error"] = attempt(
    "approximation_error",
    lambda: _approximation_error(run.model, variables, held_out),
  )
  found["measured_others_cores"] = others.cores()
  found["map"] = None
  if with_map:
    found["map"] = attention_maps.sketch(run.model, variables, run.task)
  return {**found, "jax": jax.__version__, "device": _device(), "notes": notes}


def _step_cost(run: experiment.Experiment, batch: Any) -> dict[str, Any]:
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


if __name__ == "__main__":
  entry.run(main)
