"""A whole config: the loop, the optimiser, the task and the model."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import difflib
from importlib.util import find_spec
import inspect
import pathlib
from typing import Any

import jax.numpy as jnp

from attention import ATTENTIONS
import models
from models import nested
from models.published import load
from settings.build import (
  UnknownLeafError,
  build,
  check_section,
  leaf_names,
  to_mapping,
)
from settings.errors import ConfigError
from settings.import_paths import registered
import tasks
from training import optimizer
from training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
  """A whole config, validated.

  Attributes:
    train: the loop and the optimiser.
    task_name: as `tasks.find` takes it.
    task: an instance of that task's `config_type`.
    model: what `models.create` wants to know.
    weights: folder of published weights to start from; '' starts from nothing.
  """

  train: TrainConfig
  task_name: str
  task: Any
  model: models.Config
  weights: str = ""

  def to_mapping(self) -> dict[str, Any]:
    """JSON-ready, every default filled in; `parse` inverts it."""
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

  With `model.weights`, the folder of published weights says what the model is,
  and its vocabulary, if there is one, what the ids of a text are. The config
  then chooses the mechanisms (a plain 'dense' keeps the published one),
  the dropout and the dtypes.

  Args:
    mapping: the config.
    restore: it is that of a run, which says what the model is.

  'slots' is what `workdir.write_config` adds for a reader; it may be there where
  it says what the model says.

  Raises:
    ConfigError: the first fault found.
  """
  try:
    return _parse(mapping, restore)
  except UnknownLeafError as fault:
    hint = _instead(fault, mapping.get("task", {}), mapping.get("model", {}))
    raise ConfigError(f"{fault.leaf}: unknown; {hint}") from None


def _parse(mapping: Mapping[str, Any], restore: bool) -> ExperimentConfig:
  check_section("config", mapping)
  leaves = dict(mapping.items())
  recorded = leaves.pop("slots", None)
  if "tasks" in leaves:
    raise ConfigError(
      "config.tasks: this is the config of a comparison, which compare.py runs; "
      "train.py takes that of one run, such as configs/copy.py"
    )
  sections = {
    name: leaves.pop(name) for name in ("task", "model") if name in leaves
  }
  for name, section in sections.items():
    check_section(f"config.{name}", section)
  train = build(TrainConfig, leaves)
  # What was trained elsewhere may be read without it.
  if train.log.wandb and not restore and find_spec("wandb") is None:
    raise ConfigError(
      "config.log.wandb: the package is missing; pip install wandb"
    )
  with _faults_at("optimizer"):
    optimizer.make_optimizer(train.optimizer, num_steps=1)
    # A run records what it was trained with.
    resolved = optimizer.with_defaults(train.optimizer)
    train = dataclasses.replace(train, optimizer=resolved)
  for name in ("task", "model"):
    if name not in sections:
      raise ConfigError(f"config.{name}: missing, and it has no default")
  task_leaves = dict(sections["task"].items())
  name = str(task_leaves.pop("name", None))
  with _faults_at("task", "name: "):
    task_type = tasks.find(name).config_type
  model_leaves = dict(sections["model"].items())
  weights = model_leaves.pop("weights", "")
  if not isinstance(weights, str):
    raise ConfigError(
      f"config.model.weights: expected a folder, got {weights!r}"
    )
  model_type = _model_type(model_leaves)
  with _faults_at("model"):
    nest = nested.nest(model_type, model_leaves)
  model: Any = build(model_type, nest, "config.model", typed=model_leaves)
  _check_x64(model)
  if weights and not restore:
    model = _published(weights, model)
    has_tokenizer = "tokenizer" in leaf_names(task_type)
    if has_tokenizer and tasks.find_vocabulary(pathlib.Path(weights)):
      # The ids of the weights are those of their own vocabulary.
      task_leaves["tokenizer"] = task_leaves.get("tokenizer") or weights
  if hasattr(model, "check_run"):
    with _faults_at("model"):
      model.check_run()
  if recorded not in (None, models.slots(model)):
    raise ConfigError(
      f"config.slots: the model has {models.slots(model)!r}, got {recorded!r}; "
      "choose a mechanism by config.model"
    )
  return ExperimentConfig(
    train=train,
    task_name=name,
    task=build(task_type, task_leaves, "config.task"),
    model=model,
    weights=weights,
  )


def _check_x64(model: Any) -> None:
  """Refuses a dtype that JAX would make half as wide without a word."""
  has_float64 = jnp.result_type(float) == "float64"
  for field in ("dtype", "param_dtype"):
    if getattr(model, field) == "float64" and not has_float64:
      raise ConfigError(
        f"config.model.{field}: JAX computes in float32 where it is not told "
        "otherwise; expected JAX_ENABLE_X64=1 in the environment beside 'float64'"
      )


def _published(folder: str, config: Any) -> Any:
  """The model of a folder of weights, with what a config may choose of it.

  Raises:
    ConfigError: the folder cannot be read, or its model is of another kind.
  """
  mechanisms: dict[str, Any] = {
    field: getattr(config, field)
    for field, chosen in config.attentions.items()
    if chosen != (models.AttentionConfig("dense"),)
  }
  try:
    described = load.open_folder(pathlib.Path(folder), mechanisms).described
  except (OSError, ValueError) as error:
    raise ConfigError(f"config.model.weights: {error}") from error
  published = described.config
  for field, expected in (("kind", published.kind), ("head", published.head)):
    value = getattr(config, field, None)
    if value != expected:
      raise ConfigError(
        f"config.model.{field}: the weights in {folder} are a model with "
        f"{field} {expected!r}, got {value!r}"
      )
  chosen = mechanisms
  for field in _FREE_OF_WEIGHTS:
    if hasattr(published, field):
      chosen[field] = getattr(config, field)
  # Others have no vocabulary, or none that a config chooses.
  if hasattr(published, "max_length") and not described.input_shapes:
    chosen["vocab_size"] = described.vocab_size
    chosen["max_length"] = described.max_length
  with _faults_at("model"):
    return nested.replace(published, **chosen)


_FREE_OF_WEIGHTS = (
  "dropout_rate",
  "attention_dropout_rate",
  "dtype",
  "param_dtype",
  "teacher",
)
"""Leaves that a config chooses for a published model too, beside mechanisms."""

_GONE = {
  "patch_size": None,
  "distillation": False,
  "image_shape": None,
  "local_positions": False,
}
"""Leaves that every Transformer had, and what they were without images."""


def _model_type(leaves: dict[str, Any]) -> type:
  """The dataclass of a kind of model."""
  if "kind" not in leaves:
    return models.ModelConfig  # It says that the kind is missing.
  # Runs of before December 2026 have some kinds by a field.
  for kind, (former, leaf) in registered("FORMER_KINDS").items():
    if leaves["kind"] == former and leaves.get(leaf):
      leaves["kind"] = kind
  with _faults_at("model", "kind: "):
    model_type = models.find(str(leaves["kind"]))
  # They also say of every Transformer that it has none of these.
  for leaf in _GONE.keys() & leaves.keys():
    if leaves[leaf] == _GONE[leaf] and leaf not in leaf_names(model_type):
      leaves.pop(leaf)
  return model_type


@contextlib.contextmanager
def _faults_at(section: str, leaf: str = "") -> Iterator[None]:
  """A ValueError, which begins with its leaf or is of one, as a ConfigError."""
  try:
    yield
  except ValueError as error:
    raise ConfigError(f"config.{section}.{leaf}{error}") from error


def _instead(fault: UnknownLeafError, task: Any, model: Any) -> str:
  """Where this config has an unknown leaf, or one that is like it."""
  name = fault.leaf.rpartition(".")[2]
  full = [*leaf_names(TrainConfig), "task", "model", "model.weights"]
  # A task or kind that there is not has no leaves.
  with contextlib.suppress(ValueError):
    full += leaf_names(tasks.find(str(task.get("name"))).config_type, "task.")
    full += leaf_names(models.find(str(model.get("kind"))), "model.")
  owners = [
    mechanism
    for mechanism, factory in ATTENTIONS.items()
    if name in inspect.signature(factory).parameters
  ]
  for slot, chosen in model.items():
    if hasattr(chosen, "items") and chosen.get("name") in owners:
      full.append(f"model.{slot}.{name}")
  last = {leaf: leaf.rpartition(".")[2] for leaf in full}
  # Exactly this one elsewhere is meant, rather than one that is like it here.
  cutoff = 1.0 if owners or fault.hint.startswith("did") else 0.8
  if close := difflib.get_close_matches(name, last.values(), 1, cutoff):
    places = [f"config.{leaf}" for leaf in full if last[leaf] == close[0]]
    return f"did you mean {' or '.join(places)}?"
  return f"an option of {', '.join(owners)}" if owners else fault.hint
