"""A trained run as a published model, and a published model as a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import models
from models.published import files, load
from models.transformer import Transformer
from settings.errors import ConfigError
import tasks
from tasks.text.causal import CausalText
from training import experiment, experiment_config, workdir
from training.experiment import Experiment
from training.inference import generation


def from_experiment(run: Experiment, folder: Path) -> models.Pretrained:
  """The newest checkpoint of a restored run as a model of a published family.

  Raises:
    ConfigError: there is no checkpoint, or no family is this model.
  """
  variables = generation.restore_variables(run, folder)
  try:
    return models.as_pretrained(run.model, variables)
  except ValueError as error:
    raise ConfigError(f"config.model: {error}") from error


def from_run(folder: Path) -> models.Pretrained:
  """As `from_experiment`, from the run's folder alone.

  The run is a program: its config may name mechanisms by their import paths.

  Raises:
    ConfigError: there is no run, or no family is its model.
  """
  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  return from_experiment(
    experiment.create(config, folder, restore=True), folder
  )


_LONGEST = 1024
"""Tokens that a published model reads at a time, if it can read as many."""


def open_weights(folder: Path) -> tuple[Experiment, Mapping[str, Any]]:
  """A published decoder, with its `tokenizer.json`, as a run and its variables.

  Raises:
    ConfigError: the folder cannot be read, has no tokenizer, or its model is
      not a decoder.
  """
  try:
    opened = load.open_folder(folder)
  except (OSError, ValueError) as error:
    raise ConfigError(f"workdir: {error}") from error
  kind = opened.described.config.kind
  if kind != "decoder":
    raise ConfigError(
      f"workdir: the weights in {folder} are a model of kind {kind!r}; only a "
      "decoder goes on with a text"
    )
  if tasks.find_vocabulary(folder) is None:
    raise ConfigError(
      f"workdir: {folder} has no tokenizer.json, which turns text into the ids "
      "of these weights"
    )
  context = min(opened.described.max_length, _LONGEST)
  # A restored task reads no text.
  mapping = text_mapping(
    folder, kind, {"path": str(folder), "context": context}
  )
  config = experiment_config.parse(mapping)
  run = experiment.create(config, restore=True)
  task = cast(CausalText, run.task)
  task.eos_ids = (task.eos_id, *_ends(folder, opened.theirs, task.eos_id))
  model = cast(Transformer, run.model)
  return run, load.read_variables(opened, model)


def _ends(folder: Path, config: Mapping[str, Any], known: int) -> list[int]:
  """What else ends a text by `config.json` and `generation_config.json`.

  Raises:
    ConfigError: `eos_token_id` is no id.
  """
  ends: list[int] = []
  try:
    contents = (config, files.read_generation_config(folder))
  except (OSError, ValueError) as error:
    raise ConfigError(f"workdir: {error}") from error
  for content in contents:
    ids = content.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for one in ids:
      if type(one) is not int or not 0 <= one < 2**31:
        raise ConfigError(
          f"workdir: {folder}: eos_token_id: expected an id, or a list of ids, "
          f"got {content['eos_token_id']!r}"
        )
    ends += (one for one in ids if one not in (known, *ends))
  return ends


def text_mapping(
  folder: Path, kind: str, text: Mapping[str, Any], **train: Any
) -> dict[str, Any]:
  """The config of a run that starts from published weights and reads a text.

  Args:
    folder: of the weights; they say what the model is, but for its kind.
    kind: of the model.
    text: leaves of `task`.
    **train: leaves of the run; by default one step of one row.
  """
  sizes = dict.fromkeys(("num_layers", "num_heads", "mlp_features"), 1)
  return {
    **{"num_steps": 1, "batch_size": 1, **train},
    "task": {"name": "text", **text},
    "model": {**sizes, "features": 2, "kind": kind, "weights": str(folder)},
  }
