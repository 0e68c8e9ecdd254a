"""Sizes of models that take ids, and checks of ids and lengths."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int
import numpy as np

from attention.platform.programs import is_traced
from models.kind import Sizes
from models.mechanism_variables import check_mechanisms


def check_length(name: str, length: int, limit: int) -> None:
  """Raises ValueError if a sequence is longer than the model allows."""
  if length > limit:
    raise ValueError(
      f"{name}: {length} positions are more than the model's {limit}; shorten "
      "it or create a model with a larger maximum"
    )


def check_ids(name: str, ids: Any) -> None:
  """Raises ValueError unless ids are a non-empty integer array `[B, T]`."""
  if not jnp.issubdtype(ids.dtype, jnp.integer):
    raise ValueError(f"{name}: expected integers, got {ids.dtype}")
  if len(ids.shape) != 2 or 0 in ids.shape:
    raise ValueError(
      f"{name}: expected shape [B, T] of at least one id, got {ids.shape}"
    )


def check_id_mask(name: str, mask: Any, ids: Any) -> Any:
  """Returns a mask of ids as an array.

  Raises:
    ValueError: it is not bool, or not of the shape of the ids.
  """
  mask = mask if hasattr(mask, "dtype") else np.asarray(mask)
  batch, length = ids.shape
  fits = mask.shape in ((batch, length), (1, length))
  if mask.dtype != np.bool_ or not fits:
    raise ValueError(
      f"{name}: expected bool [{batch}, {length}], True for a token, got "
      f"{mask.dtype} {mask.shape}"
    )
  return mask


def without_negative_ids(
  ids: Int[Array, "B T"], size: int, shown: Bool[Array, "#B T"] | None
) -> Int[Array, "B T"]:
  """Replaces negative ids, which a lookup would count from the end of a table.

  At unmasked positions they become `size`, whose embedding is NaN, as that of any id
  outside the table; at masked ones they become 0.
  """
  if ids.dtype.itemsize < 4:  # `size` may be too large for it.
    ids = ids.astype(jnp.int32)
  outside = size if shown is None else jnp.where(shown, size, 0)
  return jnp.where(ids < 0, outside, ids)


def batch_array(batch: Mapping[str, Any], name: str) -> Array:
  """An array of a batch.

  Raises:
    ValueError: the batch does not have it.
  """
  if name not in batch:
    raise ValueError(
      f"batch: expected {name!r}, got {', '.join(batch) or None}"
    )
  return jnp.asarray(batch[name])


def known_ids(
  name: str,
  ids: Int[Any, "B T"],
  size: int,
  unmasked: Bool[Any, "#B T"],
  *,
  hidden_id: int = 0,
  table: str = "vocabulary",
) -> Int[Array | np.ndarray, "B T"]:
  """Checks the ids of unmasked positions against the size of a table.

  If ids or `unmasked` are traced, an id outside the table becomes `size`, whose
  embedding is NaN (a negative id would count from the end).

  Args:
    name: the name of the argument, for messages.
    ids: `[B, T]`, integers.
    size: the size of the table.
    unmasked: unmasked positions; ids of masked positions may be any number.
    hidden_id: replaces ids outside the table at masked positions.
    table: name of the table, for messages.

  Raises:
    ValueError: an id is outside the table; the message has the first such id.
  """
  traced = is_traced(ids, unmasked)
  ids, unmasked = (x if traced else np.asarray(x) for x in (ids, unmasked))
  if ids.dtype.itemsize < 4:  # `size` may be too large for it.
    ids = ids.astype(np.int32)
  is_outside = (ids < 0) | (ids >= size)
  if traced:
    return jnp.where(is_outside, jnp.where(unmasked, size, hidden_id), ids)
  errors = np.argwhere(is_outside & unmasked)
  if len(errors):
    index = errors[0].tolist()
    raise ValueError(
      f"{name}: id {ids[tuple(index)]} at {index} is not in the {table}; "
      f"expected 0 to {size - 1}, or a masked position"
    )
  return np.where(is_outside, hidden_id, ids)


def id_sizes(config: Any, sizes: Sizes) -> tuple[int, int, int, int, bool]:
  """Returns the sizes of a model that takes ids, in the order of `Transformer`.

  Args:
    config: the config of a Transformer, or of a recurrent model.
    sizes: the sizes of the task.

  Raises:
    ValueError: a size is missing, or a mechanism does not support it; the message
      starts with the argument or field.
  """
  has_encoder = config.layout != "decoder"
  for name, is_needed in (
    ("source_vocab_size", has_encoder),
    ("max_source_length", has_encoder),
    ("target_vocab_size", True),
    ("max_target_length", config.layout != "encoder"),
  ):
    size = getattr(sizes, name)
    is_int = isinstance(size, int | np.integer) and not isinstance(size, bool)
    if is_needed and not (is_int and size > 0):
      raise ValueError(
        f"{name}: kind '{config.kind}' needs an int of at least 1, got {size!r}"
      )
  if sizes.shared_vocabulary and has_encoder:
    if sizes.source_vocab_size != sizes.target_vocab_size:
      raise ValueError(
        f"shared_vocabulary: source has {sizes.source_vocab_size} ids and "
        f"target {sizes.target_vocab_size}"
      )
  elif (
    config.layout == "encoder"
    and config.head == "tokens"
    and config.tie_embeddings
  ):
    raise ValueError(
      "tie_embeddings: the softmax of an encoder can share the source's table "
      "only if source and target have one vocabulary; set it to False"
    )
  for layer in getattr(config, "cycle", (config,)):
    for field, configs in layer.attentions.items():
      side = "target" if field == "decoder_attention" else "source"
      length = getattr(sizes, f"max_{side}_length") or 0
      check_mechanisms(field, configs, layer.dims(length))
  return (
    sizes.source_vocab_size or 0,
    sizes.target_vocab_size,
    sizes.max_source_length or 0,
    sizes.max_target_length or 0,
    sizes.shared_vocabulary,
  )
