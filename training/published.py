"""A trained run as a published model."""

from pathlib import Path

import models
from models.transformer import Transformer
from process.errors import ConfigError
from training import experiment, experiment_config, inference, workdir
from training.experiment import Experiment


def of_experiment(run: Experiment, folder: Path) -> models.Pretrained:
  """A run's newest checkpoint as a model of a published family.

  Args:
    run: restored.
    folder: its workdir.

  Raises:
    ConfigError: there is no checkpoint, or no family is this model.
  """
  variables = inference.restore_variables(run, folder)
  if not isinstance(run.model, Transformer):
    raise ConfigError(
      f"config.model.kind: no published family is a {run.config.model.kind!r}"
    )
  try:
    return models.as_pretrained(run.model, variables)
  except ValueError as error:
    raise ConfigError(f"config.model: {error}") from error


def of_run(folder: Path) -> models.Pretrained:
  """As `of_experiment`, from the run's folder alone.

  Raises:
    ConfigError: there is no run, or no family is its model.
  """
  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  return of_experiment(experiment.create(config, folder, restore=True), folder)
