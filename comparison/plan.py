"""Plans the runs of a comparison: their configs, and which of them cannot run."""

from collections.abc import Iterable, Sequence
import dataclasses
import functools
import itertools
import json

import jax

from comparison import layers
from comparison.config import Comparison, FieldValues
from comparison.layers import BASELINE
from comparison.measurement import costs
from comparison.planned_run import (
  DENSE,
  MATCHED,
  Run,
  group_by,
  label,
  point,
)
import models
from settings.errors import ConfigError
from settings.field_values import flatten, put
from training import experiment, experiment_config
from training.config import OptimizerConfig, TrainConfig
from training.experiment_config import ExperimentConfig

_WIDTH = "model.mlp_features"
_SOURCES = ("model.kind", "model.weights")
"""Config fields that determine the data, in addition to those of the task."""

_NARROW, _DEVIATION = 1 / 2, 0.02
"""Thresholds for a counterpart of a row.

A row has a counterpart if its feed-forward layers are narrower than the first share of
the dense model's, or if its parameter count deviates by more than the second share.
"""


def plan(comparison: Comparison) -> list[Run]:
  """Plans every run that is known before training, in the order of seeds.

  These are the reported runs, or with a grid the runs that choose its point. Nothing
  is trained or compiled: models are traced to count parameters, and their steps to
  count operations if these are the budget.

  Raises:
    ConfigError: a config field is not a field of the runs, or has an invalid value.
  """
  points: list[Run] = []
  for task, attention, across in itertools.product(
    comparison.task_names, comparison.mechanisms, comparison.across_points()
  ):
    across = layers.format_across(task, across)
    template = Run(task, attention, "", 0, {}, {}, across)
    row = [
      complete(comparison, dataclasses.replace(template, grid=grid))
      for grid in comparison.grid_points()
    ]
    points += row
    if any(map(_needs_counterpart, row)):
      points += [
        complete(comparison, dataclasses.replace(run, width=DENSE))
        for run in row
      ]
  choosing = comparison.choosing_seeds
  return [
    run.with_seed(seed, choosing=bool(choosing))
    for seed in choosing or comparison.seed_numbers
    for run in points
  ]


def data(runs: Iterable[Run]) -> dict[str, str]:
  """Maps the names of the data that the runs of a plan read to their digests.

  Raises:
    ConfigError: the data cannot be read.
  """
  runs_by_data = {}
  for run in runs:
    if not run.obstacle:
      fields = {
        field: value
        for field, value in run.fields.items()
        if field.startswith("task.") or field in _SOURCES
      }
      runs_by_data[run.task, json.dumps(fields, sort_keys=True)] = run
  return experiment.data_digests(
    config_of(run.task, run.mechanism, run.fields)
    for run in runs_by_data.values()
  )


def check_reference(runs: Sequence[Run], reference: str | None) -> None:
  """Checks that a plan has a row with the name of the reference, which can run.

  As in a report, the name may omit values of `across` that all rows share.

  Raises:
    ConfigError: there is no such row, so that nothing would be tested.
  """
  if reference is None:
    return
  runnable = [run for run in runs if not run.obstacle]
  labels = dict.fromkeys(label(vars(run)) for run in runnable)
  points = [point(run.across).split(", ") for run in runs]
  shared = [x for x in points[0] if all(x in other for other in points)]
  names = dict.fromkeys(
    ", ".join(part for part in text.split(", ") if part not in shared)
    for text in labels
  )
  if reference not in (*labels, *names):
    raise ConfigError(
      f"config.reference: expected one of the rows {'; '.join(names)}, got "
      f"{reference!r}"
    )


def counterpart_lines(runs: Sequence[Run]) -> list[str]:
  """Returns a line for each row that has a counterpart."""
  lines = []
  for row in group_by(runs, "row"):
    run = next(filter(_needs_counterpart, row), None)
    if run is not None:
      dense = run.dense_feed_forward
      lines.append(
        f"{run.row}: feed-forward {run.feed_forward} of {dense} to have "
        f"{run.parameters:,} parameters; its counterpart has {dense}"
      )
  return lines


def obstacle_lines(runs: Sequence[Run]) -> list[str]:
  """Returns a line for each row that cannot run, and a line on how to omit them."""
  rows = group_by(runs, "row")
  lines = [
    f"{row[0].row}: not supported: {row[0].obstacle}"
    for row in rows
    if all(run.obstacle for run in row)
  ]
  if not lines:
    return []
  runnable = dict.fromkeys(run.attention for run in runs if not run.obstacle)
  last = f"{len(lines)} of {len(rows)} rows cannot run"
  if 0 < len(runnable) < len({run.attention for run in runs}):
    last += f"; without them: --config.attention={','.join(runnable)}"
  return [*lines, last]


def _needs_counterpart(run: Run) -> bool:
  """Returns whether matching parameters failed or narrowed the layers too much."""
  width, parameters = run.dense_feed_forward, run.dense_parameters
  if run.width == DENSE or not width or not parameters:
    return False
  if run.feed_forward is None or run.feed_forward == width:
    return False
  deviation = abs(run.parameters - parameters) / parameters
  return run.feed_forward < _NARROW * width or deviation > _DEVIATION


def complete(comparison: Comparison, run: Run) -> Run:
  """Completes a run from its row and its point of the grid.

  The run's parameters are matched, and its budget of operations is converted to steps.

  Args:
    comparison: the comparison of the run.
    run: has the task, attention, across, width and grid; its seed is not used.

  Raises:
    ConfigError: a run with dense attention would fail as well.
  """
  task, budget = run.task, comparison.budget_seconds
  name, options = comparison.variant(run.attention)
  fields = comparison.fields(task) | run.across | run.grid
  # If `across` chooses mechanisms, dense attention is still the baseline.
  baseline_fields = {
    field: value
    for field, value in fields.items()
    if field not in run.across or not layers.is_attention_field(field)
  }
  # If dense attention fails as well, the comparison's config is wrong.
  try:
    baseline = config_of(task, BASELINE, baseline_fields)
    parameters = _count(baseline)
  except ConfigError as error:
    raise _comparison_error(error, comparison, run) from None
  run = dataclasses.replace(
    run, mechanism=name, fields=fields, budget_seconds=budget
  )
  try:
    fields = fields | layers.options_of(task, name, fields, options)
    config = config_of(task, name, fields)
    layers.check_mechanism_is_used(name, run.across, config)
    count = matched = _count(config)
  except (ConfigError, ValueError) as error:
    return dataclasses.replace(run, obstacle=str(error))
  if comparison.match_parameters:
    run = dataclasses.replace(
      run,
      feed_forward=_feed_forward(config),
      dense_feed_forward=_feed_forward(baseline),
      dense_parameters=parameters,
    )
    has_width = run.dense_feed_forward != 0
    if run.width == MATCHED and count != parameters and has_width:
      width = run.feed_forward
      if width is None or run.dense_feed_forward is None:
        raise ConfigError(
          f"config.match_parameters: a model of kind {config.model.kind!r} has no "
          "single width of feed-forward layers that could be changed; expected "
          "False"
        )
      # One hidden unit has the same number of parameters with every mechanism.
      wider = baseline_fields | {_WIDTH: run.dense_feed_forward + 1}
      unit_size = _count(config_of(task, BASELINE, wider)) - parameters
      units = max(round((parameters - count) / unit_size), 1 - width)
      if units:
        matched += units * unit_size
        fields = fields | {_WIDTH: width + units}
        config = config_of(task, name, fields)
        run = dataclasses.replace(run, feed_forward=width + units)
  if comparison.budget_flops is not None:
    steps = comparison.budget_flops / _step_flops(config)
    fields = fields | {"num_steps": max(1, int(steps))}
  steps = fields.get("num_steps", config.train.num_steps)
  return dataclasses.replace(
    run,
    fields=fields,
    parameters=matched,
    unmatched_parameters=count,
    slots=models.slots(config.model),
    options=layers.first_options(config.model, name),
    learning_rate=config.train.optimizer.learning_rate,
    steps=steps if budget is None else 0,
    length=_trained_length(config),
    solved_at=getattr(config.task, "solved_at", None),
  )


def _comparison_error(
  error: ConfigError, comparison: Comparison, run: Run
) -> ConfigError:
  """Returns a run's ConfigError with the field's name in the comparison's config."""
  field, _, message = str(error).removeprefix("config.").partition(":")
  prefix = ""
  if field in run.grid:
    prefix = "grid."
  elif field in run.across:
    prefix = "across."
  elif field in flatten(comparison.per_task.get(run.task, {})):
    prefix = f"per_task.{run.task}."
  return ConfigError(f"config.{prefix}{field}:{message}")


def _trained_length(config: ExperimentConfig) -> int | None:
  """Returns the training length of a task with other evaluation lengths; else None."""
  if not getattr(config.task, "eval_lengths", ()):
    return None
  # Tasks with mixed lengths have a `max_length`.
  lengths = (getattr(config.task, x, None) for x in ("length", "max_length"))
  return next(filter(None, lengths), None)


def _feed_forward(config: ExperimentConfig) -> int | None:
  """Width of the feed-forward layers; None if a model has no single width."""
  width = getattr(config.model, "mlp_features", None)
  return width if isinstance(width, int) else None


def config_of(
  task: str, attention: str, fields: FieldValues
) -> ExperimentConfig:
  """Returns the config that `train.py` creates from the same arguments."""
  config = layers.mapping(task, attention)
  for field, value in fields.items():
    put(config, field, value)
  return experiment_config.parse(config)


def _count(config: ExperimentConfig) -> int:
  """Counts the parameters of a model, which depend on neither loop nor optimiser.

  Raises:
    ConfigError: the model cannot be created, or its batch does not fit into memory.
  """
  size, steps = config.train.batch_size, config.train.optimizer.accumulate_steps
  optimizer = OptimizerConfig(accumulate_steps=steps)
  train = TrainConfig(num_steps=1, batch_size=size, optimizer=optimizer)
  return _parameters(dataclasses.replace(config, train=train))


@functools.cache
def _parameters(config: ExperimentConfig) -> int:
  shapes = experiment.create(config).shapes
  return sum(leaf.size for leaf in jax.tree.leaves(shapes.params))


def _step_flops(config: ExperimentConfig) -> float:
  """Counts the operations of one update, on the batch of the first step."""
  run = experiment.create(config)
  return costs.step_flops(run, run.task.train_batch(0)).flops
