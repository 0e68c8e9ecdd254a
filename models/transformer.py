"""Encoder, decoder and encoder-decoder Transformers."""

from collections.abc import Callable, Mapping
import functools
import math
from typing import Any, ClassVar, cast

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import alibi_bias, t5_bias
from models import embeddings
from models.block import apply_layers, first_gates, make_layers
from models.config import PAD_ID, ModelConfig
from models.head import Head
from models.hyper_connections import StreamHead
from models.kind import Sizes
from models.multi_head_attention import apply_mechanism
from models.sizes import (
  batch_array,
  check_id_mask,
  check_length,
  id_sizes,
  without_negative_ids,
)

OPTIONAL = ("source_mask", "source_types", "inputs_mask", "global_indices")
"""Optional arrays of a batch, keyword arguments of `Transformer.__call__`."""


class Transformer(nn.Module):
  """A Transformer that maps ids to logits, with an encoder, a decoder or both.

  Attributes:
    config: the config of the model.
    source_vocab_size: size of the encoder's vocabulary; 0 without an encoder.
    target_vocab_size: V, size of the vocabulary of the decoder and of the logits.
    max_source_length: length of the longest source; 0 without an encoder.
    max_target_length: length of the longest target; 0 without a decoder.
    shared_vocabulary: whether source and target share a vocabulary.
    attend: calls the mechanism of an attention module.
  """

  config: ModelConfig
  source_vocab_size: int
  target_vocab_size: int
  max_source_length: int
  max_target_length: int
  shared_vocabulary: bool = False
  attend: Callable[..., Array] = apply_mechanism

  optional: ClassVar[tuple[str, ...]] = OPTIONAL

  @nn.nowrap
  def arguments(
    self, batch: Mapping[str, Any]
  ) -> tuple[tuple[Array | None, ...], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call on a batch."""
    layout = self.config.layout
    ids = (
      None if layout == "decoder" else batch_array(batch, "source"),
      None if layout == "encoder" else batch_array(batch, "inputs"),
    )
    return ids, {
      name: jnp.asarray(batch[name]) for name in self.optional if name in batch
    }

  @nn.nowrap
  def example(self) -> dict[str, np.ndarray]:
    """Returns a batch whose shapes `initialize` uses."""
    ids = np.ones((1, 1), np.int32)
    return {"source": ids, "inputs": ids}

  def setup(self) -> None:
    """Creates the tables and layers of the kind."""
    config = self.config
    table = functools.partial(
      embeddings.token_table,
      features=config.embedding_dim,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )
    has_encoder = config.layout != "decoder"
    has_decoder = config.layout != "encoder"
    if has_decoder or self._one_table:
      self.target_embedding = table(self.target_vocab_size)
    if has_encoder and not self._one_table:
      self.source_embedding = table(self.source_vocab_size)
    if config.head == "tokens" and not config.tie_embeddings:
      self.output_embedding = table(self.target_vocab_size)
    if config.embedding.token_types:
      self.source_types = table(config.embedding.token_types)
    stacks = ["encoder"] * has_encoder + ["decoder"] * has_decoder
    for stack in stacks:
      side, length = self._side(stack)
      if config.position == "learned":
        rows = length + config.embedding.position_offset
        is_summed = config.embedding.projected == "sum"
        width = config.embedding_dim if is_summed else config.features
        setattr(self, f"{side}_positions", table(rows, features=width))
      if config.embedding.embedding_dim:
        projection = nn.Dense(
          config.features,
          use_bias=config.embedding.projected == "sum",
          dtype=config.dtype,
          param_dtype=config.param_dtype,
        )
        setattr(self, f"{side}_projection", projection)
      if config.embedding.embedding_norm:
        setattr(self, f"{side}_embedding_norm", config.make_norm())
      if config.norm != "post":
        setattr(self, f"{stack}_norm", config.make_norm())
      if config.slot.streams > 1:
        setattr(self, f"{stack}_streams", StreamHead(config))
    if has_encoder:
      self.encoder = make_layers(
        config, self.max_source_length, attend=self.attend
      )
    if has_decoder:
      self.decoder = make_layers(
        config,
        self.max_target_length,
        self.max_source_length,
        is_decoder=True,
        attend=self.attend,
      )
    if config.position == "t5":
      shape = config.slot.relative_buckets, config.num_heads
      normal = nn.initializers.normal(0.02)
      self.relative_bias = {
        stack: self.param(
          f"{stack}_relative_bias", normal, shape, config.param_dtype
        )
        for stack in stacks
      }
    if config.position == "disentangled":
      disentangled = config.slot.disentangled
      for stack in stacks:
        positions = table(disentangled.size, features=config.features)
        setattr(self, f"{stack}_relative_embeddings", positions)
        if disentangled.norm:
          setattr(self, f"{stack}_relative_norm", config.make_norm())
    self.head = Head(config, self.target_vocab_size)
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self,
    source: Int[Array, "B S"] | None = None,
    inputs: Int[Array, "B T"] | None = None,
    *,
    source_mask: Bool[Array, "B S"] | None = None,
    source_types: Int[Array, "B S"] | None = None,
    inputs_mask: Bool[Array, "B T"] | None = None,
    global_indices: Int[Array, "B G"] | None = None,
    deterministic: bool = True,
    **embedded: Any,
  ) -> Float[Array, "B T V"]:
    """Computes the logits of every position; a decoder is causal.

    Args:
      source: `[B, S]`, ids of the encoder.
      inputs: `[B, T]`, ids of the decoder.
      source_mask: `[B, S]`, the positions of the source that hold a token; None is
        all that are not `PAD_ID`.
      source_types: `[B, S]`, the type of each token, for `token_types`; None is 0.
      inputs_mask: `[B, T]`, the inputs that hold a token; None is all.
      global_indices: `[B, G]`, positions of the source that attend to all positions
        and that all attend to, −1 for none; for mechanisms with 'global'.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.
      **embedded: further arguments of `embed_inputs`.

    Returns:
      `[B, T, V]` float32, or float64 with dtype 'float64'; for an encoder T is S, or 1
      with head 'class'. With head 'hidden', features `[B, S, F]`.

    Raises:
      ValueError: a sequence is longer than the model allows.
    """
    memory, mask = None, None
    if self.config.layout != "decoder":
      memory, mask = self._encode(
        source, source_mask, source_types, global_indices, deterministic
      )
    if self.config.layout == "encoder":
      return self._logits(memory, cast(Array, mask)[:, 0, 0])
    inputs = cast(Array, inputs)
    check_length("inputs", inputs.shape[1], self.max_target_length)
    if inputs_mask is not None:
      inputs_mask = check_id_mask("inputs_mask", inputs_mask, inputs)
    inputs = self.lookup_ids(inputs, inputs_mask)
    positions = np.arange(inputs.shape[1])[None, :]
    token_index = positions
    if self.config.embedding.position_skips_masked and inputs_mask is not None:
      token_index = jnp.cumsum(inputs_mask, axis=1) * inputs_mask - 1
    x = self._decoder_inputs(inputs, token_index, deterministic, **embedded)
    x = self._apply_stack(
      "decoder",
      x,
      memory,
      positions=positions,
      mask=None if inputs_mask is None else inputs_mask[:, None, None, :],
      memory_mask=mask,
      is_causal=True,
      deterministic=deterministic,
      ids=inputs,
    )
    return self._logits(x)

  @nn.nowrap
  def lookup_ids(
    self, inputs: Int[Array, "B T"], mask: Bool[Array, "#B T"] | None
  ) -> Int[Array, "B T"]:
    """Replaces ids of no token; a subclass may give some of them a meaning."""
    return without_negative_ids(inputs, self.target_vocab_size, mask)

  def start(
    self,
    source: Int[Array, "B S"] | None,
    batch: int,
    max_length: int,
    source_mask: Bool[Array, "B S"] | None = None,
  ) -> None:
    """Runs the encoder and creates the collections 'memory' and 'cache'.

    Args:
      source: ids of the encoder, or None.
      batch: number of sequences to decode, a multiple of that of sources.
      max_length: number of positions to decode.
      source_mask: as in a call.
    """
    memory = None
    if source is not None:
      memory, mask = self._encode(source, source_mask)
      self.put_variable("memory", "mask", mask)
    for block in self.decoder:
      block.start(batch, max_length, memory)
    self.put_variable("cache", "index", jnp.zeros((batch,), jnp.int32))

  def prefill(
    self,
    inputs: Int[Array, "B P"],
    lengths: Int[Array, "B"],
    **embedded: Any,
  ) -> Float[Array, "B V"]:
    """Reads the first `lengths` of P ids into 'cache' in one call.

    Args:
      inputs: `[B, P]`, the ids.
      lengths: `[B]`, the number of ids of each sequence.
      **embedded: as in a call.

    Returns:
      `[B, V]`, the logits after the last id of each sequence.
    """
    positions = np.arange(inputs.shape[1])[None, :]
    x = self._decoder_features(inputs, positions, lengths, **embedded)
    self.put_variable("cache", "index", lengths.astype(jnp.int32))
    last = jnp.take_along_axis(x, lengths[:, None, None] - 1, axis=1)
    return self._logits(self._norm_output("decoder", last))[:, 0]

  def decode(self, inputs: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Computes the logits after one more id of each sequence, and updates 'cache'."""
    index = self.get_variable("cache", "index")
    x = self._decoder_features(inputs[:, None], index[:, None])
    self.put_variable("cache", "index", index + 1)
    return self._logits(self._norm_output("decoder", x))[:, 0]

  def _decoder_features(self, inputs, positions, lengths=None, **embedded):
    """Computes the features of the inputs; each layer updates 'cache'."""
    mask = self.get_variable("memory", "mask")
    x = self._decoder_inputs(inputs, positions, **embedded)
    tables = self._relative_tables("decoder")
    x, shared_gates = self._split_streams(x), first_gates(self.decoder)
    for block in self.decoder:
      x = block.decode(
        x, positions, mask, lengths, inputs, shared_gates, **tables
      )
      if shared_gates is not None:
        x, shared_gates = x
    return self._join_streams("decoder", x)

  @nn.nowrap
  def _side(self, stack: str) -> tuple[str, int]:
    """The side of a batch that a stack reads, and its largest length."""
    if stack == "encoder":
      return "source", self.max_source_length
    return "target", self.max_target_length

  def _relative_tables(self, stack: str) -> dict[str, Any]:
    """The relative position table that all layers of a stack share."""
    config = self.config
    if config.position == "t5":
      distance, is_causal = config.slot.relative_distance, stack == "decoder"
      bias = t5_bias(self.relative_bias[stack], distance, is_causal=is_causal)
    elif config.position == "alibi":
      bias = alibi_bias(config.num_heads, self._side(stack)[1])
    elif config.position == "disentangled":
      rows = getattr(self, f"{stack}_relative_embeddings").embedding
      rows = rows.astype(config.dtype)
      if config.slot.disentangled.norm:
        rows = getattr(self, f"{stack}_relative_norm")(rows)
      return {"relative_embeddings": rows}
    else:
      return {}
    return {"relative_bias": bias}

  def _encode(
    self,
    source,
    source_mask=None,
    source_types=None,
    global_indices=None,
    deterministic=True,
  ):
    """Computes the features of the source and the mask of its tokens."""
    check_length("source", source.shape[1], self.max_source_length)
    if source_mask is None:
      source_mask = source != PAD_ID
    source_mask = check_id_mask("source_mask", source_mask, source)
    mask = source_mask[:, None, None, :]
    table = self.target_embedding if self._one_table else self.source_embedding
    source = without_negative_ids(source, table.num_embeddings, source_mask)
    x = self._embed(table, "source", source, self._positions(source))
    if self.config.embedding.token_types:
      types = jnp.zeros_like(source) if source_types is None else source_types
      x = x + self.source_types(types)
    call = {} if global_indices is None else {"global_indices": global_indices}
    x = self._apply_stack(
      "encoder",
      self._finish_embedding("source", x, deterministic),
      positions=np.arange(x.shape[1])[None, :],
      mask=mask,
      deterministic=deterministic,
      **call,
    )
    return x, mask

  def _apply_stack(self, stack, x, *memory, **call):
    """Applies a stack to whole sequences."""
    call |= self._relative_tables(stack)
    blocks, remat = getattr(self, stack), self.config.remat
    x = self._split_streams(x)
    x = apply_layers(blocks, x, *memory, remat=remat, **call)
    return self._norm_output(stack, self._join_streams(stack, x))

  def _split_streams(self, x):
    """Copies features to each of several residual streams."""
    count = self.config.slot.streams
    return x if count == 1 else jnp.repeat(x[:, :, None], count, axis=2)

  def _join_streams(self, stack, x):
    """Joins the residual streams at the end of a stack."""
    is_one = self.config.slot.streams == 1
    return x if is_one else getattr(self, f"{stack}_streams")(x)

  def _norm_output(self, stack, x):
    """Applies the norm at the end of a stack; with norm 'post', there is none."""
    return (
      x if self.config.norm == "post" else getattr(self, f"{stack}_norm")(x)
    )

  @property
  def _one_table(self):
    """Whether encoder and target share one table."""
    config = self.config
    if config.layout == "encoder":
      tied = config.tie_embeddings and config.head == "tokens"
    else:
      tied = config.embedding.tie_inputs
      tied = config.tie_embeddings if tied is None else tied
    return self.shared_vocabulary and tied

  def _positions(self, source):
    """Indices into the encoder's table of positions."""
    embedding = self.config.embedding
    first, padding = embedding.position_offset, embedding.position_padding
    if padding is None:
      return first + np.arange(source.shape[1])[None, :]
    is_token = source != padding
    return first - 1 + jnp.cumsum(is_token, axis=1) * is_token

  def embed_inputs(
    self,
    inputs: Int[Array, "B T"],
    positions: Int[Array | np.ndarray, "B T"],
    deterministic: bool = True,
  ) -> Float[Array, "B T F"]:
    """Computes the decoder's embeddings of ids and positions."""
    del deterministic  # A subclass may draw random numbers.
    positions = positions + self.config.embedding.position_offset
    return self._embed(self.target_embedding, "target", inputs, positions)

  def _decoder_inputs(self, inputs, positions, deterministic=True, **embedded):
    """Embeds ids and positions of the decoder; applies norm and dropout."""
    x = self.embed_inputs(inputs, positions, deterministic, **embedded)
    return self._finish_embedding("target", x, deterministic)

  def _finish_embedding(self, side, x, deterministic):
    """Applies the config's norm and projection and dropout to the sum of embeddings."""
    if self.config.embedding.embedding_norm:
      x = getattr(self, f"{side}_embedding_norm")(x)
    x = self._project_embedding("sum", side, x)
    return self.dropout(x, deterministic=deterministic)

  def _embed(self, table, side, ids, positions):
    """Adds the embeddings of ids and positions."""
    config = self.config
    scale = config.embedding.embedding_scale
    scale = math.sqrt(config.features) if scale is None else scale
    x = table(ids) * scale
    x = self._project_embedding("tokens", side, x)
    if config.position == "learned":
      x = x + getattr(self, f"{side}_positions")(positions) * scale
    if added := config.added_position:
      x = x + added(positions, x.shape[-1]).astype(x.dtype)
    return x

  def _project_embedding(self, kind, side, x):
    """Maps embeddings of width E to F if the config projects this `kind`."""
    embedding = self.config.embedding
    if embedding.embedding_dim is None or embedding.projected != kind:
      return x
    return getattr(self, f"{side}_projection")(x)

  def _logits(self, x, mask=None):
    table = None
    if self.config.head == "tokens":
      tied = self.config.tie_embeddings
      table = self.target_embedding if tied else self.output_embedding
    return self.head(x, table, mask)


def create(config: ModelConfig, sizes: Sizes) -> Transformer:
  """Creates a Transformer for a task's sizes; computes nothing.

  Raises:
    ValueError: the task has inputs that are not ids; or as `id_sizes`.
  """
  if sizes.input_shapes:
    raise ValueError(
      f"kind: '{config.kind}' reads ids; expected a kind of model that reads "
      f"{' and '.join(sizes.input_shapes)}, which the task has"
    )
  return Transformer(config, *id_sizes(config, sizes))
