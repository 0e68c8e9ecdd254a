"""A model with another mechanism in some of its layers, in memory and as a folder."""

from collections.abc import Collection
from pathlib import Path
import secrets
import shutil
from typing import Any

import jax

import models
from models.attention_config import AttentionConfig
from models.published import load
from models.published.family import Described
from models.transformer import Transformer
from projects.swap import substitution
from projects.swap.source import Place, Source
from projects.swap.substitution import Mechanisms


def describe(
  source: Source, config: AttentionConfig, places: Collection[Place]
) -> Described:
  """The config of the model with a mechanism at some places.

  Raises:
    ValueError: the mechanism cannot be used there.
  """
  substitution.check(config.build())
  swapped = {(place.slot, place.layer) for place in places}
  chosen = {}
  for slot in {place.slot: None for place in source.places}:
    layers = source.described.config.layers(slot)
    chosen[slot] = tuple(
      config if (slot, layer) in swapped else one
      for layer, one in enumerate(layers)
    )
  return load.with_layers(source.described, chosen)


def make(
  source: Source, described: Described, seed: int
) -> tuple[Transformer, dict[str, Any]]:
  """A model and its variables, including those that the mechanism draws.

  Raises:
    ValueError: the mechanism does not support the sizes of the model.
  """
  model = load.make_model(described)
  key = jax.random.key(seed)
  return model, load.read_variables(source.opened, model, key)


def save(
  source: Source, model: Transformer, variables: Any, folder: Path
) -> None:
  """Writes a swapped model and its vocabulary atomically."""
  p = source.opened.pretrained(model, variables)
  partial = folder.with_name(f"{folder.name}.{secrets.token_hex(8)}.tmp")
  try:
    models.save_pretrained(partial, p)
    shutil.copy(source.vocabulary, partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def write(
  source: Source,
  config: AttentionConfig,
  places: Collection[Place],
  mechanisms: Mechanisms,
  folder: Path,
) -> None:
  """Writes the model with a mechanism at some places.

  Args:
    source: the model and its text.
    config: the mechanism.
    places: the places of the mechanism.
    mechanisms: its variables at every place.
    folder: the folder to write.
  """
  # All random variables are replaced, so the seed does not matter.
  model, variables = make(source, describe(source, config, places), 0)
  # Mechanisms at other places may have variables with the same names.
  swapped = {place.path: mechanisms[place.path] for place in places}
  save(source, model, substitution.insert(variables, swapped), folder)
