"""The inputs of transformers' models as our batches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

from attention.platform.programs import is_traced
from models.sizes import check_ids, known_ids

_SOURCE = {"input_ids": "source", "attention_mask": "source_mask"}
TEXTS: Mapping[str, Mapping[str, str]] = MappingProxyType(
  {
    "encoder": {
      **_SOURCE,
      "token_type_ids": "source_types",
      "global_attention_mask": "global_indices",
    },
    "decoder": {"input_ids": "inputs", "attention_mask": "inputs_mask"},
    "encoder_decoder": {
      **_SOURCE,
      "decoder_input_ids": "inputs",
      "decoder_attention_mask": "inputs_mask",
    },
  }
)
"""Layout of a model -> names of inputs in transformers -> names in a batch."""


_MASKS = {
  "input_ids": "attention_mask",
  "token_type_ids": "attention_mask",
  "decoder_input_ids": "decoder_attention_mask",
}
"""Inputs that are ids -> the mask of their tokens."""


_LENGTHS = "max_position_embeddings", "n_positions", "model_max_length"
"""Keys of `config.json` for the length of the longest sequence."""


def to_batch(
  model: Any,
  names: Mapping[str, str] | None,
  inputs: Mapping[str, Any],
  hf_config: Mapping[str, Any],
  needs_first_token: bool = False,
) -> dict[str, Any]:
  """Converts inputs to a batch of `models.forward`.

  Args:
    model: model from `models.create`.
    names: names of inputs -> names in a batch; the first is required. None means the
      inputs of text models.
    inputs: inputs by their names in transformers.
    hf_config: `config.json`.
    needs_first_token: as in `Family`.

  Raises:
    ValueError: an input is unknown, missing, or differs from the ids in shape; there
      are too many positions; an id is outside the vocabulary; or a mask has values
      other than 0 and 1.
  """
  config = model.config
  if names is None:
    names = dict(TEXTS[config.layout])
    needed = [name for name in names if name.endswith("input_ids")]
    if not (hasattr(config, "embedding") and config.embedding.token_types):
      names.pop("token_type_ids", None)
    if not (hasattr(config, "slot") and config.slot.global_projections):
      names.pop("global_attention_mask", None)
  else:
    needed = list(names)[:1]
  given = {
    name: _array(name, value)
    for name, value in inputs.items()
    if value is not None
  }
  for name in inputs:
    if name not in names:
      raise ValueError(
        f"{name}: this model does not read it; expected {', '.join(names)}"
      )
  for name in needed:
    if name not in given:
      raise ValueError(f"{name}: missing")
  _check_ids(given)
  if needs_first_token:
    _check_first_token(config, given.get("attention_mask"))
  batch = {
    names[name]: _indices(value)
    if name == "global_attention_mask"
    else jnp.asarray(
      _check_values(model, name, given) if name in _MASKS else value
    )
    for name, value in given.items()
  }
  for name, ours in names.items():
    side = {"source": "source", "inputs": "target"}.get(ours)
    limit = (
      getattr(model, f"max_{side}_length", None) if name in given else None
    )
    if limit and given[name].shape[1] > limit:
      key = next((key for key in _LENGTHS if key in hf_config), "config.json")
      raise ValueError(
        f"{name}: {given[name].shape[1]} positions are more than the model's "
        f"{limit} ({key})"
      )
  if "source" in batch:
    # Any id may be a token: only the mask marks padding.
    everything = jnp.ones(batch["source"].shape, bool)
    batch["source_mask"] = batch.get("source_mask", everything) != 0
  if "inputs_mask" in batch:
    batch["inputs_mask"] = batch["inputs_mask"] != 0
  return batch


def _array(name: str, value: Any) -> Any:
  """Returns the values of an input; None if it is traced."""
  try:
    return value if is_traced(value) else np.asarray(value)
  except ValueError:
    raise ValueError(f"{name}: expected rows of one length") from None


def _check_ids(given: Mapping[str, Any]) -> None:
  """Raises ValueError if there are no ids or other inputs differ in shape."""
  for name in given:
    if name in _MASKS:
      check_ids(name, given[name])
  for name, value in given.items():
    ids = "decoder_input_ids" if name.startswith("decoder_") else "input_ids"
    if ids not in given:
      continue
    rows, length = given["input_ids"].shape[0], given[ids].shape[1]
    # An input that is the same for all rows may have one row.
    shapes = {(rows, length), (1, length)} if name != ids else {(rows, length)}
    if value.shape not in shapes:
      raise ValueError(
        f"{name}: expected shape {(rows, length)}, as the input has it, got "
        f"{value.shape}"
      )
    if name.endswith("_mask") and not is_traced(value):
      others = value[(value != 0) & (value != 1)]
      if others.size:  # An additive mask (0 and -inf) would be inverted.
        raise ValueError(f"{name}: expected 0 and 1, got {others.flat[0]}")


def _check_first_token(config: Any, mask: Any) -> None:
  """Raises ValueError if a classifier reads a token that the mask hides."""
  if mask is None or is_traced(mask) or config.head != "class":
    return
  if not config.output.mean_pooling and not mask[:, 0].all():
    raise ValueError(
      "attention_mask: expected 1 for the first token of each row, which the "
      "classifier reads; pad on the right"
    )


def _check_values(model: Any, name: str, given: Mapping[str, Any]) -> Any:
  """Checks ids; those at masked positions may be any number."""
  ids = given[name]
  is_token = given.get(_MASKS[name], np.ones((1, 1))) != 0
  if name == "token_type_ids":
    types = model.config.embedding.token_types
    return known_ids(name, ids, types, is_token, table="token types")
  is_source = model.config.layout != "decoder" and name == "input_ids"
  size = model.source_vocab_size if is_source else model.target_vocab_size
  embedding = getattr(model.config, "embedding", None)
  padding = getattr(embedding, "position_padding", None) or 0
  return known_ids(name, ids, size, is_token, hidden_id=padding)


def _indices(mask: Any) -> Array:
  """The positions where a mask is not 0, padded with −1.

  The width is the largest number in a row or, if the mask is traced, its length.
  """
  numpy = jnp if is_traced(mask) else np
  chosen = numpy.asarray(mask) != 0
  counts = chosen.sum(1)[:, None]
  most = chosen.shape[1] if numpy is jnp else max(int(counts.max()), 1)
  order = numpy.argsort(~chosen, axis=1, stable=True)[:, :most]
  return jnp.where(jnp.arange(most)[None] < counts, order, -1)
