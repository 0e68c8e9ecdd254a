"""The sizes of what reads ids, from those of a task."""

from typing import Any

from models.kind import Sizes
from models.mechanism_variables import check_mechanisms


def check_length(name: str, length: int, limit: int) -> None:
  """Raises ValueError where a sequence is longer than the model allows."""
  if length > limit:
    raise ValueError(
      f"{name}: {length} positions are more than the model's {limit}; shorten "
      "it or make a model with a larger maximum"
    )


def id_sizes(config: Any, sizes: Sizes) -> tuple[int, int, int, int, bool]:
  """The sizes of a module that reads ids, as `Transformer` takes them.

  Args:
    config: of a Transformer, or of a recurrent model.
    sizes: of the task.

  Raises:
    ValueError: a size is missing, or a mechanism cannot work at it; the message
      starts with the argument or field.
  """
  has_encoder = config.layout != "decoder"
  for name, needed in (
    ("source_vocab_size", has_encoder),
    ("max_source_length", has_encoder),
    ("target_vocab_size", True),
    ("max_target_length", config.layout != "encoder"),
  ):
    size = getattr(sizes, name)
    if needed and (size is None or size < 1):
      raise ValueError(f"{name}: kind '{config.kind}' needs it, got {size}")
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
    for field, chosen in layer.attentions.items():
      side = "target" if field == "decoder_attention" else "source"
      length = getattr(sizes, f"max_{side}_length") or 0
      check_mechanisms(field, chosen, layer.dims(length))
  return (
    sizes.source_vocab_size or 0,
    sizes.target_vocab_size,
    sizes.max_source_length or 0,
    sizes.max_target_length or 0,
    sizes.shared_vocabulary,
  )
