"""Converts trained runs to published models, and published models to runs."""

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
  """Converts the newest checkpoint of a run to a model of a published family.

  Raises:
    ConfigError: there is no checkpoint, or no family describes this model.
  """
  variables = generation.restore_variables(run, folder)
  try:
    return models.as_pretrained(run.model, variables)
  except ValueError as error:
    raise ConfigError(f"config.model: {error}") from error


def from_run(folder: Path) -> models.Pretrained:
  """Converts a run like `from_experiment`, but takes only its folder.

  This may execute code: the config may name mechanisms by their import paths.

  Raises:
    ConfigError: there is no run, or no family describes its model.
  """
  config = experiment_config.parse(workdir.read_config(folder), restore=True)
  return from_experiment(
    experiment.create(config, folder, restore=True), folder
  )


_MAX_CONTEXT = 1024
"""The largest context of a published model, in tokens."""


def open_weights(folder: Path) -> tuple[Experiment, Mapping[str, Any]]:
  """Opens a published decoder with its `tokenizer.json` as a run.

  Returns:
    The run, and the variables of its model.

  Raises:
    ConfigError: the folder cannot be read, has no tokenizer, or its model is
      not a decoder.
  """
  try:
    opened = load.open_folder(folder)
  except (OSError, ValueError) as error:
    raise ConfigError(f"workdir: {error}") from error
  kind = opened.description.config.kind
  if kind != "decoder":
    raise ConfigError(
      f"workdir: the weights in {folder} are a model of kind {kind!r}; only a "
      "decoder continues a text"
    )
  if tasks.find_vocabulary(folder) is None:
    raise ConfigError(
      f"workdir: {folder} has no tokenizer.json, which encodes text for these "
      "weights"
    )
  context = min(opened.description.max_length, _MAX_CONTEXT)
  # The task of a restored run reads no text.
  mapping = text_mapping(
    folder, kind, {"path": str(folder), "context": context}
  )
  config = experiment_config.parse(mapping)
  run = experiment.create(config, restore=True)
  task = cast(CausalText, run.task)
  others = _other_eos_ids(folder, opened.hf_config, task.eos_id)
  task.eos_ids = (task.eos_id, *others)
  model = cast(Transformer, run.model)
  return run, load.read_variables(opened, model)


def _other_eos_ids(
  folder: Path, config: Mapping[str, Any], eos_id: int
) -> list[int]:
  """Returns the end ids of `config.json` and `generation_config.json` besides `eos_id`.

  Raises:
    ConfigError: `eos_token_id` is not an id.
  """
  others: list[int] = []
  try:
    contents = (config, files.read_generation_config(folder))
  except (OSError, ValueError) as error:
    raise ConfigError(f"workdir: {error}") from error
  for content in contents:
    ids = content.get("eos_token_id")
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    for x in ids:
      if type(x) is not int or not 0 <= x < 2**31:
        raise ConfigError(
          f"workdir: {folder}: eos_token_id: expected an id, or a list of ids, "
          f"got {content['eos_token_id']!r}"
        )
    others += (x for x in ids if x not in (eos_id, *others))
  return others


def text_mapping(
  folder: Path, kind: str, text: Mapping[str, Any], **train: Any
) -> dict[str, Any]:
  """Returns the config of a run that starts from published weights and reads a text.

  Args:
    folder: the folder of weights, which determine the model, except for its kind.
    kind: the kind of the model.
    text: fields of `task`.
    **train: fields of the run; the default is one step of one row.
  """
  sizes = dict.fromkeys(("num_layers", "num_heads", "mlp_features"), 1)
  return {
    **{"num_steps": 1, "batch_size": 1, **train},
    "task": {"name": "text", **text},
    "model": {**sizes, "features": 2, "kind": kind, "weights": str(folder)},
  }
