"""The config of a whole experiment: loop, optimiser, task and model."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import difflib
from importlib.util import find_spec
import inspect
import os
import pathlib
from typing import Any

import jax.numpy as jnp

from attention import ATTENTIONS
import models
from models import nested
from models.published import load
from settings.build import (
  UnknownFieldError,
  build,
  check_section,
  field_names,
  to_mapping,
)
from settings.errors import ConfigError
from settings.import_paths import registered
import tasks
from training import optimizer
from training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """The validated config of an experiment.

  Attributes:
    train: the loop and the optimiser.
    task_name: a name that `tasks.find` accepts.
    task: an instance of that task's `config_type`.
    model: the config of the model, for `models.create`.
    weights: folder of published weights to start from; '' starts from random ones.
  """

  train: TrainConfig
  task_name: str
  task: Any
  model: models.Config
  weights: str = ""

  def to_mapping(self) -> dict[str, Any]:
    """Returns a JSON-ready mapping with all defaults; `parse` is the inverse."""
    return {
      **to_mapping(self.train),
      "task": {"name": self.task_name, **to_mapping(self.task)},
      "model": to_mapping(self.model)
      | ({"weights": self.weights} if self.weights else {}),
    }


def parse(
  mapping: Mapping[str, Any], *, restore: bool = False
) -> ExperimentConfig:
  """Validates a config, a ConfigDict or parsed JSON, without reading data.

  With `model.weights`, the folder of published weights determines the model, and its
  vocabulary, if there is one, determines the ids of a text. The config then chooses
  the mechanisms (a plain 'dense' keeps the published one), the dropout, the dtypes and
  `remat`.

  The config may have the field 'slots', which `workdir.write_config` adds for
  readers, if it agrees with the model.

  Args:
    mapping: the config.
    restore: whether it is the config of an existing run, which specifies the whole
      model.

  Raises:
    ConfigError: the first error found.
  """
  try:
    return _parse(mapping, restore)
  except UnknownFieldError as error:
    hint = _hint(error, mapping.get("task", {}), mapping.get("model", {}))
    raise ConfigError(f"{error.field}: unknown; {hint}") from None


def _parse(mapping: Mapping[str, Any], restore: bool) -> ExperimentConfig:
  check_section("config", mapping)
  fields = dict(mapping.items())
  recorded = fields.pop("slots", None)
  if "tasks" in fields:
    raise ConfigError(
      "config.tasks: this is the config of a comparison, which compare.py runs; "
      "train.py takes that of one run, such as configs/copy.py"
    )
  sections = {
    name: fields.pop(name) for name in ("task", "model") if name in fields
  }
  for name, section in sections.items():
    check_section(f"config.{name}", section)
  train = build(TrainConfig, fields)
  # Existing runs can be read without the package.
  if train.log.wandb and not restore and find_spec("wandb") is None:
    raise ConfigError(
      "config.log.wandb: the package is missing; pip install wandb"
    )
  with _errors_at("optimizer"):
    optimizer.make_optimizer(train.optimizer, num_steps=1)
    # A run records the values with which it was trained.
    resolved = optimizer.with_defaults(train.optimizer)
    train = dataclasses.replace(train, optimizer=resolved)
  for name in ("task", "model"):
    if name not in sections:
      raise ConfigError(f"config.{name}: missing, and it has no default")
  task_fields = dict(sections["task"].items())
  name = str(task_fields.pop("name", None))
  with _errors_at("task", "name: "):
    task_type = tasks.find(name).config_type
  model_fields = dict(sections["model"].items())
  weights = model_fields.pop("weights", "")
  if isinstance(weights, os.PathLike):
    weights = os.fspath(weights)
  if not isinstance(weights, str):
    raise ConfigError(
      f"config.model.weights: expected a folder, got {weights!r}"
    )
  model_type = _model_type(model_fields)
  with _errors_at("model"):
    nest = nested.nest(model_type, model_fields)
  model: Any = build(model_type, nest, "config.model", typed=model_fields)
  _check_x64(model)
  if weights and not restore:
    model = _published_model(weights, model)
    has_tokenizer = "tokenizer" in field_names(task_type)
    if has_tokenizer and tasks.find_vocabulary(pathlib.Path(weights)):
      # The weights need the ids of their own vocabulary.
      task_fields["tokenizer"] = task_fields.get("tokenizer") or weights
  if hasattr(model, "check_run"):
    with _errors_at("model"):
      model.check_run()
  if recorded not in (None, models.slots(model)):
    raise ConfigError(
      f"config.slots: the model has {models.slots(model)!r}, got {recorded!r}; "
      "choose a mechanism by config.model"
    )
  return ExperimentConfig(
    train=train,
    task_name=name,
    task=build(task_type, task_fields, "config.task"),
    model=model,
    weights=weights,
  )


def _check_x64(model: Any) -> None:
  """Raises ConfigError if JAX would silently replace float64 by float32."""
  has_float64 = jnp.result_type(float) == "float64"
  for field in ("dtype", "param_dtype"):
    if getattr(model, field) == "float64" and not has_float64:
      raise ConfigError(
        f"config.model.{field}: JAX computes in float32 by default; expected "
        "JAX_ENABLE_X64=1 in the environment with 'float64'"
      )


def _published_model(folder: str, config: Any) -> Any:
  """Returns the model of a folder of weights, with the fields that a config may choose.

  Raises:
    ConfigError: the folder cannot be read, or its model is of another kind.
  """
  mechanisms: dict[str, Any] = {
    field: getattr(config, field)
    for field, chosen in config.attentions.items()
    if chosen != (models.AttentionConfig("dense"),)
  }
  try:
    description = load.open_folder(pathlib.Path(folder), mechanisms).description
  except (OSError, ValueError) as error:
    raise ConfigError(f"config.model.weights: {error}") from error
  published = description.config
  for field, expected in (("kind", published.kind), ("head", published.head)):
    value = getattr(config, field, None)
    if value != expected:
      raise ConfigError(
        f"config.model.{field}: the weights in {folder} are a model with "
        f"{field} {expected!r}, got {value!r}"
      )
  chosen = mechanisms
  for field in _CHOSEN_FIELDS:
    if hasattr(published, field):
      chosen[field] = getattr(config, field)
  # Other models have no vocabulary, or none that a config chooses.
  if hasattr(published, "max_length") and not description.input_shapes:
    chosen["vocab_size"] = description.vocab_size
    chosen["max_length"] = description.max_length
  with _errors_at("model"):
    return nested.replace(published, **chosen)


_CHOSEN_FIELDS = (
  "dropout_rate",
  "attention_dropout_rate",
  "dtype",
  "param_dtype",
  "remat",
  "teacher",
)
"""Config fields that also apply to a published model, besides the mechanisms."""

_REMOVED_FIELDS = {
  "patch_size": None,
  "distillation": False,
  "image_shape": None,
  "local_positions": False,
}
"""Maps former config fields of every Transformer to their values without images."""


def _model_type(fields: dict[str, Any]) -> type:
  """Returns the config type of a kind of model; removes former fields."""
  if "kind" not in fields:
    return models.ModelConfig  # It reports the missing kind.
  # Runs from before December 2026 choose some kinds by a field.
  for kind, (old_kind, field) in registered("FORMER_KINDS").items():
    if fields["kind"] == old_kind and fields.get(field):
      fields["kind"] = kind
  with _errors_at("model", "kind: "):
    model_type = models.find(str(fields["kind"]))
  # Transformers of these runs also have fields for images.
  for field in sorted(_REMOVED_FIELDS.keys() & fields.keys()):
    if fields[field] == _REMOVED_FIELDS[field] and field not in field_names(
      model_type
    ):
      fields.pop(field)
  return model_type


@contextlib.contextmanager
def _errors_at(section: str, field: str = "") -> Iterator[None]:
  """Raises a ValueError as a ConfigError that names the config field."""
  try:
    yield
  except ValueError as error:
    raise ConfigError(f"config.{section}.{field}{error}") from error


def _hint(error: UnknownFieldError, task: Any, model: Any) -> str:
  """Returns a hint for an unknown config field: a similar field, or its owner."""
  name = error.field.rpartition(".")[2]
  full = [*field_names(TrainConfig), "task", "model", "model.weights"]
  # An unknown task or kind has no fields.
  with contextlib.suppress(ValueError):
    full += field_names(tasks.find(str(task.get("name"))).config_type, "task.")
    full += field_names(models.find(str(model.get("kind"))), "model.")
  owners = [
    mechanism
    for mechanism, factory in ATTENTIONS.items()
    if name in inspect.signature(factory).parameters
  ]
  for field, chosen in model.items():
    if hasattr(chosen, "items") and chosen.get("name") in owners:
      full.append(f"model.{field}.{name}")
  last = {field: field.rpartition(".")[2] for field in full}
  # The same name elsewhere is more likely than a similar name here.
  cutoff = 1.0 if owners or error.hint.startswith("did") else 0.8
  if close := difflib.get_close_matches(name, last.values(), 1, cutoff):
    similar = [f"config.{field}" for field in full if last[field] == close[0]]
    return f"did you mean {' or '.join(similar)}?"
  return f"an option of {', '.join(owners)}" if owners else error.hint
