"""Reads the original model and the text on which it is measured."""

from collections.abc import Mapping
import hashlib
from pathlib import Path
import re
from typing import Any, NamedTuple

import jax

import models
from models.attention_config import AttentionConfig
from models.published import load
from models.published.family import Description
from models.transformer import Transformer
from projects.swap.settings import Settings
from settings.errors import ConfigError
import tasks
from tasks import files
from tasks import text as text_task
from training import checkpoint

_MAX_DEFAULT_CONTEXT = 256


class AttentionModule(NamedTuple):
  """One self-attention module of a model.

  Attributes:
    field: the config field, 'encoder_attention' or 'decoder_attention'.
    layer: number of the layer, from 0.
  """

  field: str
  layer: int

  @property
  def side(self) -> str:
    """'encoder' or 'decoder'."""
    return self.field.removesuffix("_attention")

  @property
  def path(self) -> str:
    """The path of the module in the model."""
    return f"{self.side}_{self.layer}/self_attention"


class Source(NamedTuple):
  """A model with weights, and a text for it.

  Attributes:
    opened: the opened folder of the weights.
    description: description of the model, in float32.
    model: the Linen module.
    variables: its variables.
    vocabulary: the vocabulary file.
    task: training windows and held-out windows of the text.
    batches: the held-out windows for losses.
    data: digests of the text, the vocabulary and the weights, by name.
    modules: all self-attention modules, in the order of the model.
    context: number of tokens of a window.
  """

  opened: load.Opened
  description: Description
  model: Transformer
  variables: Mapping[str, Any]
  vocabulary: Path
  task: tasks.Task
  batches: list[tasks.Batch]
  data: Mapping[str, str]
  modules: tuple[AttentionModule, ...]
  context: int

  @property
  def kind(self) -> str:
    """'encoder', 'decoder' or 'encoder_decoder'."""
    return self.description.config.kind


def read(settings: Settings) -> Source:
  """Reads the weights and the text.

  Raises:
    ConfigError: the folder or the text cannot be read, the model predicts no
      tokens, there is no vocabulary or one of another size, or the text is
      shorter than a window.
  """
  folder = Path(settings.weights)
  try:
    opened = load.open_folder(folder)
  except (OSError, ValueError) as error:
    raise ConfigError(f"--weights: {error}") from error
  description = _with_keys(
    load.with_attention(opened.description, None, "float32")
  )
  config = description.config
  if not isinstance(config, models.ModelConfig):
    raise ConfigError(
      f"--weights: {opened.architecture} is of kind {config.kind!r}; expected a "
      "Transformer"
    )
  if config.head != "tokens":
    raise ConfigError(
      f"--weights: {opened.architecture} predicts no tokens, so it has no loss "
      "on a text; expected a language model"
    )
  if settings.batch_size % jax.device_count():
    raise ConfigError(
      f"--batch_size: expected a multiple of the {jax.device_count()} devices, "
      f"got {settings.batch_size}"
    )
  vocabulary = _vocabulary(settings, folder)
  context = settings.context or min(
    description.max_length, _MAX_DEFAULT_CONTEXT
  )
  if context > description.max_length:
    raise ConfigError(
      f"--context: expected at most the {description.max_length} tokens that the "
      f"model reads, got {context}"
    )
  if not Path(settings.text).is_file():
    raise ConfigError(f"--text: no such file: {settings.text}")
  try:
    with files.record_digests() as notes:
      task = text_task.make(
        text_task.TextConfig(
          path=settings.text,
          context=context,
          eval_batches=settings.batches,
          tokenizer=str(vocabulary),
        ),
        kind=config.kind,
        batch_size=settings.batch_size,
        seed=settings.seed,
      )
  except ValueError as error:
    raise ConfigError(_with_flags(str(error))) from error
  if task.target_vocab_size > description.vocab_size:
    raise ConfigError(
      f"--tokenizer: {vocabulary} has {task.target_vocab_size} ids, more than "
      f"the {description.vocab_size} of the model"
    )
  model = load.make_model(description)
  try:
    variables = load.read_variables(opened, model)
  except ValueError as error:
    raise ConfigError(f"--weights: {error}") from error
  modules = tuple(
    AttentionModule(field, layer)
    for field in config.attentions
    if field != "cross_attention"
    for layer in range(len(config.layers(field)))
    # A layer may have no attention.
    if field != "decoder_attention"
    or config.decoder_configs[layer].slot.self_attention
  )
  if max(settings.keep) > len(modules):
    raise ConfigError(
      f"--keep: expected at most the {len(modules)} layers of the model, got "
      f"{max(settings.keep)}"
    )
  return Source(
    opened=opened,
    description=description,
    model=model,
    variables=variables,
    vocabulary=vocabulary,
    task=task,
    data=files.name_digests(notes) | {"--weights": _digest(variables)},
    batches=list(task.eval_batches(task.eval_splits[0])),
    modules=modules,
    context=context,
  )


def _digest(variables: Mapping[str, Any]) -> str:
  digests = sorted(checkpoint.digests(variables).items())
  return hashlib.sha256(repr(digests).encode()).hexdigest()


def describe(source: Source) -> str:
  """Describes the model and the windows of the text in one line."""
  parameters = sum(leaf.size for leaf in jax.tree.leaves(source.variables))
  return (
    f"{source.opened.architecture} with {models.slots(source.description.config)} "
    f"attention in {len(source.modules)} layers, {parameters:,} parameters, "
    f"windows of {source.context} tokens"
  )


def _with_keys(description: Description) -> Description:
  """Returns an equal model whose keys and values another mechanism can use."""
  config = description.config
  if not isinstance(config, models.ModelConfig) or config.kind != "decoder":
    return description
  configs = config.layers("decoder_attention")
  # In a hybrid, only some layers have low-rank keys and values.
  ranks = [layer.slot.latent_rank for layer in config.decoder_configs]
  if not any(ranks):
    return description
  dense = AttentionConfig("dense")
  layers = tuple(
    dense if rank and layer.name == "latent" else layer
    for layer, rank in zip(configs, ranks, strict=True)
  )
  return load.with_layers(description, {"decoder_attention": layers})


def _vocabulary(settings: Settings, folder: Path) -> Path:
  """Finds the vocabulary file for a text.

  Raises:
    ConfigError: the vocabulary does not exist.
  """
  typed = Path(settings.tokenizer or folder)
  if typed.is_file() and settings.tokenizer:
    return typed
  vocabulary = tasks.find_vocabulary(typed)
  if vocabulary is not None:
    return vocabulary
  if settings.tokenizer:
    raise ConfigError(f"--tokenizer: no such file, or no tokenizer in {typed}")
  raise ConfigError(
    f"--weights: {folder} has no tokenizer.json to encode the text; "
    "name one with --tokenizer=FILE"
  )


_FLAGS = {"path": "--text", "context": "--context"}


def _with_flags(message: str) -> str:
  """Replaces fields of the text task in a message by flags of `swap.py`."""
  return re.sub(
    r"\btask\.(\w+)", lambda m: _FLAGS.get(m[1], f"--{m[1]}"), message
  )
