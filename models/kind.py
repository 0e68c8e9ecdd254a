"""The interface of a kind of model: its config and its module."""

from collections.abc import Mapping
import types
from typing import Any, ClassVar, NamedTuple, Protocol

from models.attention_config import AttentionConfig

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Sizes(NamedTuple):
  """The sizes of a task that a model needs; None or 0 for a size that it does not have.

  Attributes:
    source_vocab_size: size of the encoder's vocabulary.
    target_vocab_size: V, size of the vocabulary of the logits.
    max_source_length: length of the longest source.
    max_target_length: length of the longest target.
    shared_vocabulary: whether source and target share a vocabulary.
    input_shapes: the inputs of a batch that are not ids, such as 'image' -> the
      shape of one example.
  """

  source_vocab_size: int | None
  target_vocab_size: int
  max_source_length: int | None
  max_target_length: int | None
  shared_vocabulary: bool = False
  input_shapes: Mapping[str, Any] = NOTHING


Model = Any
"""A Linen module: `init`, `apply`, its `config`, and two methods:

  arguments   `(batch) -> (positional, options)`, the arguments of a call
  example     `() -> batch`, whose shapes `initialize` uses

A call returns logits `[B, T, V]`. A module may also have `attend`, a field that it
gives to each `MultiHeadAttention`, so that `models.sequence_sharded` and
`models.replace_attention` can replace it; `state`, names of collections that a
training step updates, such as the running statistics of batch norm;
`draw_attention` and `name_map`, which draw its attention
(`training.pictures.attention_maps`); `input_file` and `draw_input`, which draw its
attention for an input file (`training.commands.draw_attention`); and `as_published`,
which describes it as a published model (`models.as_pretrained`).
"""


class Config(Protocol):
  """The config of a kind of model: a frozen dataclass that validates itself.

  Attributes:
    module: import path 'package.module:create' of the function that creates the
      module, `(config, sizes) -> Model`.
  """

  module: ClassVar[str]

  @property
  def kind(self) -> str:
    """The name of the kind, `model.kind` of an experiment."""
    ...

  @property
  def num_layers(self) -> int:
    """The number of layers of the encoder or decoder, whichever is larger."""
    ...

  @property
  def dtype(self) -> str:
    """The dtype of activations."""
    ...

  @property
  def param_dtype(self) -> str:
    """The dtype of parameters."""
    ...

  @property
  def layout(self) -> str:
    """The layout of batches: 'encoder', 'decoder' or 'encoder_decoder'."""
    ...

  @property
  def attentions(self) -> Mapping[str, tuple[AttentionConfig, ...]]:
    """Maps each attention field to its mechanisms, which layers take in turn."""
    ...

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of each layer to which the field applies."""
    ...
