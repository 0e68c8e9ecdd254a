"""Measures a model with another mechanism in its layers."""

from collections.abc import Mapping, Sequence
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attention import Attention
from attention.names import failure_location
from comparison.measurement import costs
import models
from models.published import load
from models.published.family import Description
from models.transformer import Transformer
from projects.swap import scores as scores_lib
from projects.swap import substitution, transfer, variant
from projects.swap.records import CANNOT, DONE, MODELS, OWN, Record, folder_name
from projects.swap.settings import Choice, Settings
from projects.swap.source import Source
from projects.swap.substitution import Mechanisms
from settings.errors import one_line
from settings.typed import format_options
from training import optimizer as optimizer_lib
from training.config import OptimizerConfig, TrainConfig
from training.pictures import attention_maps
from training.state import TrainState


def original_row(source: Source, settings: Settings) -> Record:
  """Measures the original model, as a row like those of the mechanisms.

  Args:
    source: the model and its text.
    settings: the options of the swap.

  Returns:
    A record; see `mechanism`.
  """
  scores = scores_lib.make(source, None)
  return {
    "attention": OWN,
    "name": models.slots(source.description.config),
    "status": DONE,
    "reason": "",
    "layers": [],
    "swaps": [
      {"keep": 0, "kept": [], "folder": "", **scores.measure({}, set())}
    ],
    "map": attention_maps.sketch(source.model, source.variables, source.task),
    **_costs(source, settings, source.description),
  }


def mechanism(
  source: Source, choice: Choice, settings: Settings, workdir: Path
) -> Record:
  """Takes all measurements of one mechanism before fine-tuning.

  Swapped models, transferred if `transfer_steps` is not 0, are written to `workdir`.

  Args:
    source: the model and its text.
    choice: the mechanism.
    settings: the options of the swap.
    workdir: folder of the swap.

  Returns:
    The 'options' that are set, and 'all_options' as text, with the defaults; 'status'
    and 'reason'; for each layer 'error' and 'loss', and after the transfer
    'transfer_error' and 'transfer_loss'; the 'error' of all layers together; for each
    number k in `settings.keep` a swap with the kept layers, its loss and accuracy
    before and after the transfer, and its folder; time and memory; and attention maps.
  """
  record: Record = {
    "attention": choice.label,
    "name": choice.config.name,
    "options": dict(choice.config.options),
    "all_options": format_options(choice.config.all_options),
  }
  attention = choice.config.build()
  paths = [module.path for module in source.modules]
  try:
    description = variant.describe(source, choice.config, source.modules)
    model, variables = variant.make(source, description, settings.seed)
    mechanisms = substitution.extract(variables, paths)
    _check_traces(model, variables, source)
    _check_substitutes(source, attention, mechanisms)
  except Exception as error:
    # Mechanisms of the project raise ValueError; others may raise any exception.
    is_external = ":" in choice.config.name
    if not is_external and not isinstance(error, ValueError):
      raise
    reason = (
      failure_location(error, choice.config.name)
      if is_external
      else one_line(error)
    )
    return {**record, "status": CANNOT, "reason": reason}
  scores = scores_lib.make(source, attention)
  results, error = _layer_results(scores, paths, mechanisms)
  kept = _most_sensitive_modules(paths, results, settings.keep)
  layers: list[dict[str, Any]] = [
    {"side": module.side, "layer": module.layer, **result}
    for module, result in zip(source.modules, results, strict=True)
  ]
  swaps: list[dict[str, Any]] = [
    {
      "keep": k,
      "kept": [paths.index(path) for path in paths if path in stay],
      "folder": folder_name(choice.label, k),
      **scores.measure(mechanisms, {*paths} - stay),
    }
    for k, stay in kept.items()
  ]
  trained = [tree.get("params", {}) for tree in mechanisms.values()]
  record |= {
    "status": DONE,
    "reason": "",
    "error": error,
    "trained": sum(leaf.size for leaf in jax.tree.leaves(trained)),
    "layers": layers,
    "swaps": swaps,
    "map": attention_maps.sketch(model, variables, source.task),
  }
  fitted, notes = mechanisms, {}
  if settings.transfer_steps and record["trained"]:
    fitted = transfer.fit(
      source.model,
      source.variables,
      attention,
      mechanisms,
      source.task.train_batch,
      steps=settings.transfer_steps,
      rate=settings.transfer_rate,
      pad_id=source.task.pad_id,
    )
  if not _are_finite(fitted):
    notes["transfer"] = "diverged and is not used; lower --transfer_rate"
  elif fitted is not mechanisms:
    mechanisms = fitted
    results, record["transfer_error"] = _layer_results(
      scores, paths, mechanisms
    )
    for layer, result in zip(layers, results, strict=True):
      layer |= _transfer_columns(result)
    for swap, stay in zip(swaps, kept.values(), strict=True):
      swap |= _transfer_columns(scores.measure(mechanisms, {*paths} - stay))
    variables = substitution.insert(variables, mechanisms)
    record["transfer_map"] = attention_maps.sketch(
      model, variables, source.task
    )
  for swap, stay in zip(swaps, kept.values(), strict=True):
    modules = [module for module in source.modules if module.path not in stay]
    target = workdir / MODELS / swap["folder"]
    variant.write(source, choice.config, modules, mechanisms, target)
  record |= _costs(source, settings, description)
  return record | {"notes": notes | record["notes"]}


def _are_finite(mechanisms: Mechanisms) -> bool:
  leaves = jax.tree.leaves(mechanisms)
  return all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)


def _layer_results(
  scores: scores_lib.Quality, paths: Sequence[str], mechanisms: Mechanisms
) -> tuple[list[dict[str, float]], float]:
  """Returns error, loss and accuracy with each layer swapped alone; total error."""
  errors, total_error = scores.errors(mechanisms)
  return [
    {"error": error, **scores.measure(mechanisms, {path})}
    for path, error in zip(paths, errors, strict=True)
  ], total_error


def _transfer_columns(results: Mapping[str, float]) -> dict[str, float]:
  return {f"transfer_{name}": value for name, value in results.items()}


def _check_traces(model: Transformer, variables: Any, source: Source) -> None:
  """Raises ValueError if a mechanism rejects the arguments of its calls."""
  batch = source.task.train_batch(0)
  jax.eval_shape(lambda: models.forward(model, variables, batch))


def _check_substitutes(
  source: Source, attention: Attention, mechanisms: Mechanisms
) -> None:
  """Raises ValueError if a mechanism cannot use the inputs of the one it replaces."""
  batch = source.task.train_batch(0)
  swapped = {path: jnp.array(True) for path in mechanisms}
  jax.eval_shape(
    lambda: substitution.logits(
      source.model, source.variables, batch, attention, mechanisms, swapped
    )
  )


def _most_sensitive_modules(
  paths: Sequence[str],
  layers: Sequence[Mapping[str, float]],
  keep: Sequence[int],
) -> dict[int, set[str]]:
  """Returns, for each k, the k modules whose swap increases the loss most."""
  # Losses that are not finite count as the largest.
  cost = [
    layer["loss"] if math.isfinite(layer["loss"]) else math.inf
    for layer in layers
  ]
  order = sorted(range(len(paths)), key=lambda i: -cost[i])
  return {k: {paths[i] for i in order[:k]} for k in keep}


def _costs(
  source: Source, settings: Settings, description: Description
) -> dict[str, Any]:
  """Measures a training step at one or two lengths, and the size of the cache."""
  record: dict[str, Any] = {"notes": {}}
  batch = source.task.train_batch(0)
  lengths = {"": (source.context, batch)}
  if settings.length is not None:
    row = {
      name: np.resize(array[:1], (jax.device_count(), settings.length))
      for name, array in batch.items()
    }
    lengths["long_"] = (settings.length, row)
  for prefix, (length, rows) in lengths.items():
    names = ("step_seconds", "temp_bytes")
    try:
      cost = _step_cost(source, settings, description, length, rows)
    # The mechanism may not support this length, or the memory may be too small.
    except (ValueError, jax.errors.JaxRuntimeError) as error:
      cost = dict.fromkeys(names)
      record["notes"][f"{prefix}step_seconds"] = one_line(error)
    record |= {f"{prefix}{name}": cost[name] for name in names}
  decodes = source.kind == "decoder" and all(
    layer.build().init_cache
    for layer in description.config.layers("decoder_attention")
  )
  if decodes:
    model = _model(description, 2 * source.context)
    sizes = [costs.cache_bytes(model, n * source.context) or 0 for n in (1, 2)]
    record["cache_bytes"] = sizes[0]
    record["cache_token_bytes"] = (sizes[1] - sizes[0]) / source.context
  return record


def _model(description: Description, length: int) -> Transformer:
  """Returns the model, for sequences of at least `length` tokens."""
  longest = max(length, description.max_length)
  return load.make_model(description._replace(max_length=longest))


def _step_cost(
  source: Source,
  settings: Settings,
  description: Description,
  length: int,
  rows: Mapping[str, np.ndarray],
) -> dict[str, Any]:
  """Measures time and memory of a training step, with random weights."""
  model = _model(description, length)
  optimizer = OptimizerConfig(learning_rate=settings.finetune_rate)
  config = TrainConfig(
    num_steps=1, batch_size=settings.batch_size, optimizer=optimizer
  )
  update = optimizer_lib.make_optimizer(optimizer, config.num_steps)
  variables = models.initialize(model, jax.random.key(0), rows)
  state = TrainState.first(variables, update)
  return costs.step_cost(model, source.task, config, state, rows)
