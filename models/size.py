"""The size of a model from its config alone, before a module is made."""

import math
from typing import NamedTuple

from models.config import ModelConfig
from models.conformer_config import ConformerConfig
from models.perceiver_config import PerceiverConfig
from models.pyramid_config import PyramidConfig
from models.seq2seq_config import Seq2SeqConfig

Config = (
  ModelConfig
  | Seq2SeqConfig
  | PyramidConfig
  | PerceiverConfig
  | ConformerConfig
)
"""What any model is made of."""


class Sizes(NamedTuple):
  """What `models.create` is told of a task; None and 0 where it has no such.

  Attributes:
    source_vocab_size: of the ids that an encoder reads.
    target_vocab_size: V, of the logits.
    max_source_length: the longest source.
    max_target_length: the longest target.
    shared_vocabulary: source and target ids mean the same.
    image_shape: height, width and channels of images.
    frames_shape: frames and bands of the longest recording.
    patches_shape: rows, columns, height, width and channels of the patches of an
      image that a decoder reads among its ids.
  """

  source_vocab_size: int | None
  target_vocab_size: int
  max_source_length: int | None
  max_target_length: int | None
  shared_vocabulary: bool = False
  image_shape: tuple[int, int, int] | None = None
  frames_shape: tuple[int, int] | None = None
  patches_shape: tuple[int, int, int, int, int] | None = None


def least_parameters(config: Config, symbols: int) -> int:
  """Parameters that a model has at least; takes no time for any size.

  Counted are the tables that a Transformer's config sizes, or one of symbols,
  and of each layer two square matrices, the query's and the output's projection
  or a part of a recurrent cell, and the two matrices of a feed-forward layer, of
  which a Conformer's has two; of a Perceiver its latents as well.

  Args:
    config: of the model.
    symbols: of the larger vocabulary.
  """
  if isinstance(config, PyramidConfig):
    return symbols * config.features[-1] + sum(
      depth * (2 * features**2 + 2 * features * wide)
      for depth, features, wide in zip(
        config.depths, config.features, config.mlp_features, strict=True
      )
    )
  features = config.features
  if isinstance(config, PerceiverConfig):
    inside = config.latents
    layer = 2 * features * (inside.query + inside.value + inside.mlp)
    rows = max(symbols, config.vocab_size or 0) * (config.head == "tokens")
    return (
      config.num_layers * layer
      + config.num_latents * features
      + (rows + (config.max_length or 0)) * config.input_features
    )
  layer = 2 * features * features
  rows = symbols
  if isinstance(config, ModelConfig):
    # Of queries and of results; a mechanism may have no keys. Layers may differ.
    layer = features * min(
      (one.num_qk_heads or one.num_heads) * one.query_dim
      + one.num_heads * (one.value_dim or one.query_dim)
      for one in config.cycle
    )
    layer += 2 * features * config.mlp_features
    rows = max(symbols, config.vocab_size or 0) + config.token_types
    rows += config.position_offset
    if config.position == "learned":
      rows += config.max_length or 0
    if config.position == "t5":
      rows += config.relative_buckets * config.num_heads // features
  if isinstance(config, ConformerConfig):
    layer += 4 * features * config.mlp_features
  return config.num_layers * layer + rows * features


def least_activations(
  config: Config,
  length: int,
  image_shape: tuple[int, ...] | None = None,
) -> int:
  """Numbers that the layers keep of one row at least, for the backward pass.

  Counted is what feed-forward layers read and compute.

  Args:
    config: of the model.
    length: tokens of a row.
    image_shape: of the task, for a model that reads images.
  """
  if isinstance(config, PyramidConfig):
    if image_shape is None:  # `models.create` refuses such a task.
      return 0
    grids = config.grids(*image_shape[:2])
    return sum(
      depth * math.prod(grid) * (features + wide)
      for depth, grid, features, wide in zip(
        config.depths, grids, config.features, config.mlp_features, strict=True
      )
    )
  # A recurrent model has no feed-forward layers.
  wide = getattr(config, "mlp_features", 0)
  return config.num_layers * length * (config.features + wide)


def grid_of(shape: tuple[int, ...], patch_size: int) -> tuple[int, int]:
  """Rows and columns of patches of an image; what is left of it is not read."""
  return shape[0] // patch_size, shape[1] // patch_size


def num_tokens(config: ModelConfig, shape: tuple[int, ...]) -> int:
  """T, of an image `(height, width, …)`."""
  assert config.patch_size is not None
  return 1 + config.distillation + math.prod(grid_of(shape, config.patch_size))
