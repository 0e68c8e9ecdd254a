"""What transformers calls the inputs of a model, as a batch of ours."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array
import numpy as np

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
"""Layout of a model -> the inputs of transformers -> their names in a batch."""


def to_batch(
  config: Any, names: Mapping[str, str] | None, inputs: Mapping[str, Any]
) -> dict[str, Any]:
  """The batch that `models.forward` reads.

  Args:
    config: of the model.
    names: of the inputs, if not those of texts -> names in a batch; the first
      has to be given.
    inputs: by the names of transformers.

  Raises:
    ValueError: an input that this model does not read, or one that is missing.
  """
  if names is None:
    names = dict(TEXTS[config.layout])
    needed = [name for name in names if name.endswith("input_ids")]
    if not (hasattr(config, "embedding") and config.embedding.token_types):
      names.pop("token_type_ids", None)
    if not (hasattr(config, "slot") and config.slot.global_projections):
      names.pop("global_attention_mask", None)
  else:
    needed = list(names)[:1]
  batch = {}
  for name, value in inputs.items():
    if name not in names:
      raise ValueError(
        f"{name}: this model does not read it; expected {', '.join(names)}"
      )
    if value is not None:
      is_global = name == "global_attention_mask"
      batch[names[name]] = _indices(value) if is_global else jnp.asarray(value)
  for name in needed:
    if names[name] not in batch:
      raise ValueError(f"{name}: missing")
  if "source" in batch:
    # Any id may be a token: only the mask says what is padding.
    everything = jnp.ones(batch["source"].shape, bool)
    batch["source_mask"] = batch.get("source_mask", everything) != 0
  if "inputs_mask" in batch:
    batch["inputs_mask"] = batch["inputs_mask"] != 0
  return batch


def _indices(mask: Any) -> Array:
  """The positions where a mask is not 0, -1 after them.

  As many as its row with the most; where it is traced, as many as positions.
  """
  numpy = jnp if isinstance(mask, jax.core.Tracer) else np
  chosen = numpy.asarray(mask) != 0
  counts = chosen.sum(1)[:, None]
  most = chosen.shape[1] if numpy is jnp else max(int(counts.max()), 1)
  order = numpy.argsort(~chosen, axis=1, stable=True)[:, :most]
  return jnp.where(jnp.arange(most)[None] < counts, order, -1)
