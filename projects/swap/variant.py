"""Models with another mechanism in some of their layers, in memory and as folders."""

from collections.abc import Collection
from pathlib import Path
import secrets
import shutil
from typing import Any

import jax

import models
from models.attention_config import AttentionConfig
from models.published import load
from models.published.family import Description
from models.transformer import Transformer
from projects.swap import substitution
from projects.swap.source import AttentionModule, Source
from projects.swap.substitution import Mechanisms


def describe(
  source: Source, config: AttentionConfig, modules: Collection[AttentionModule]
) -> Description:
  """Returns the config of the model with a mechanism in some modules.

  Raises:
    ValueError: the mechanism cannot be used there.
  """
  substitution.check(config.build())
  swapped = {(module.field, module.layer) for module in modules}
  layers = {}
  for field in {module.field: None for module in source.modules}:
    originals = source.description.config.layers(field)
    layers[field] = tuple(
      config if (field, i) in swapped else original
      for i, original in enumerate(originals)
    )
  return load.with_layers(source.description, layers)


def make(
  source: Source, description: Description, seed: int
) -> tuple[Transformer, dict[str, Any]]:
  """Creates a model and its variables; those of the mechanism are random.

  Raises:
    ValueError: the mechanism does not support the sizes of the model.
  """
  model = load.make_model(description)
  key = jax.random.key(seed)
  return model, load.read_variables(source.opened, model, key)


def save(
  source: Source, model: Transformer, variables: Any, folder: Path
) -> None:
  """Writes a swapped model and its vocabulary; an earlier one is replaced at the end."""
  p = source.opened.pretrained(model, variables)
  name = f"{folder.name}.{secrets.token_hex(8)}"
  partial, previous = (folder.with_name(name + x) for x in (".tmp", ".old"))
  try:
    models.save_pretrained(partial, p)
    shutil.copy(source.vocabulary, partial)
    if folder.exists():
      folder.rename(previous)
    partial.rename(folder)
    shutil.rmtree(previous, ignore_errors=True)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def write(
  source: Source,
  config: AttentionConfig,
  modules: Collection[AttentionModule],
  mechanisms: Mechanisms,
  folder: Path,
) -> None:
  """Writes the model with a mechanism in some modules.

  Args:
    source: the model and its text.
    config: the mechanism.
    modules: the modules of the mechanism.
    mechanisms: its variables in every module.
    folder: the folder to write.
  """
  # All random variables are replaced, so any seed will do.
  model, variables = make(source, describe(source, config, modules), 0)
  # Mechanisms in other modules may have variables with the same names.
  swapped = {module.path: mechanisms[module.path] for module in modules}
  save(source, model, substitution.insert(variables, swapped), folder)
