"""What the core asks of a model: of its config, and of the module made from it."""

from collections.abc import Mapping
import types
from typing import Any, ClassVar, NamedTuple, Protocol

from models.attention_config import AttentionConfig

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Sizes(NamedTuple):
  """What a model is told of a task; None and 0 where it has no such.

  Attributes:
    source_vocab_size: of the ids that an encoder reads.
    target_vocab_size: V, of the logits.
    max_source_length: the longest source.
    max_target_length: the longest target.
    shared_vocabulary: source and target ids mean the same.
    input_shapes: what a batch has in place of ids, such as 'image' -> the shape
      of one row.
  """

  source_vocab_size: int | None
  target_vocab_size: int
  max_source_length: int | None
  max_target_length: int | None
  shared_vocabulary: bool = False
  input_shapes: Mapping[str, Any] = NOTHING


Model = Any
"""A Linen module: `init`, `apply`, its `config`, and of its own

  arguments   `(batch) -> (positional, options)` of a call: what it reads
  example     `() -> batch`, of which `initialize` reads the shapes

A call returns logits `[B, T, V]`. A module may say more of itself: `attend`, a field
that it gives to each `MultiHeadAttention`, so that `models.sequence_sharded` and
`models.replace_attention` can replace it; `state`, names of collections that a step
of training replaces, as batch norm does its running statistics; `draw_attention` and `name_map`, how its attention is drawn
(`training.pictures.attention_maps`), `input_file` and `draw_input`, likewise of a file
(`training.commands.draw_attention`); `as_published`, what it is as a published model
(`models.as_pretrained`).
"""


class Config(Protocol):
  """The config of a kind of model: a frozen dataclass that checks itself.

  Attributes:
    module: 'package.module:create', which makes the module, `(config, sizes) ->
      Model`: a path, as its file imports the config.
  """

  module: ClassVar[str]

  @property
  def kind(self) -> str:
    """Its name, `model.kind` of an experiment."""
    ...

  @property
  def num_layers(self) -> int:
    """Of its longest stack."""
    ...

  @property
  def dtype(self) -> str:
    """Of activations."""
    ...

  @property
  def param_dtype(self) -> str:
    """Of parameters."""
    ...

  @property
  def layout(self) -> str:
    """Whose batches it reads: 'encoder', 'decoder' or 'encoder_decoder'."""
    ...

  @property
  def attentions(self) -> Mapping[str, tuple[AttentionConfig, ...]]:
    """Slot -> its mechanisms, which layers take in turn."""
    ...

  def layers(self, field: str) -> tuple[AttentionConfig, ...]:
    """The mechanism of every layer that has the slot `field`."""
    ...
