"""Encoder, decoder and encoder-decoder Transformers from one block."""

import functools
import math
from typing import Any, cast

from flax import linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention import alibi_bias, t5_bias
from models import positions as position_encodings
from models import tables
from models.block import Block
from models.config import ModelConfig

T5_BUCKETS = 32
"""Buckets of distance, up to 128 positions, as in T5."""

PAD_ID = 0
"""Id of padding in a source; nothing attends to it."""


class Transformer(nn.Module):
  """Ids to logits: encoder, decoder or both.

  Attributes:
    config: of the model.
    source_vocab_size: of the encoder's ids; 0 without an encoder.
    target_vocab_size: V, of the decoder's ids and of the logits.
    max_source_length: the longest source; 0 without an encoder.
    max_target_length: the longest target; 0 without a decoder.
    shared_vocabulary: source and target ids mean the same.
  """

  config: ModelConfig
  source_vocab_size: int
  target_vocab_size: int
  max_source_length: int
  max_target_length: int
  shared_vocabulary: bool = False

  def setup(self) -> None:
    """Makes the tables and the layers that the kind has."""
    config = self.config
    attentions = config.attentions
    has_encoder = config.kind != "decoder"
    has_decoder = config.kind != "encoder"
    table = functools.partial(
      tables.token_table,
      features=config.features,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )
    one_table = config.tie_embeddings and self.shared_vocabulary
    if has_decoder or one_table:
      self.target_embedding = table(self.target_vocab_size)
    if has_encoder and not one_table:
      self.source_embedding = table(self.source_vocab_size)
    if not config.tie_embeddings:
      self.output_embedding = table(self.target_vocab_size)
    norm = functools.partial(
      nn.LayerNorm, dtype=config.dtype, param_dtype=config.param_dtype
    )
    if has_encoder:
      if config.position == "learned":
        self.source_positions = table(self.max_source_length)
      self.encoder = [
        Block(config, attentions["encoder_attention"], self.max_source_length)
        for _ in range(config.num_layers)
      ]
      if config.norm == "pre":
        self.encoder_norm = norm()
    if has_decoder:
      if config.position == "learned":
        self.target_positions = table(self.max_target_length)
      self.decoder = [
        Block(
          config,
          attentions["decoder_attention"],
          self.max_target_length,
          attentions.get("cross_attention"),
          self.max_source_length,
        )
        for _ in range(config.num_layers)
      ]
      if config.norm == "pre":
        self.decoder_norm = norm()
    if config.position == "t5":
      stacks = ["encoder"] * has_encoder + ["decoder"] * has_decoder
      self.relative_bias = {
        stack: self.param(
          f"{stack}_relative_bias",
          nn.initializers.normal(0.02),
          (T5_BUCKETS, config.num_heads),
          config.param_dtype,
        )
        for stack in stacks
      }
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self,
    source: Int[Array, "B S"] | None = None,
    inputs: Int[Array, "B T"] | None = None,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "B T V"]:
    """Logits of every position, each from inputs up to its own.

    Args:
      source: ids the encoder reads, `PAD_ID` where there is nothing; for kinds
        with an encoder.
      inputs: ids the decoder reads; for kinds with a decoder.
      deterministic: no dropout; otherwise the rng 'dropout' is needed.

    Returns:
      `[B, T, V]` float32; T = S for an encoder.

    Raises:
      ValueError: a sequence is longer than the model allows.
    """
    memory, mask = None, None
    if self.config.kind != "decoder":
      memory, mask = self._encode(source, deterministic)
    if self.config.kind == "encoder":
      return self._logits(memory)
    inputs = cast(Array, inputs)
    check_length("inputs", inputs.shape[1], self.max_target_length)
    positions = np.arange(inputs.shape[1])[None, :]
    x = self._embed_target(inputs, positions, deterministic)
    for block in self.decoder:
      x = block(
        x,
        memory,
        positions=positions,
        memory_mask=mask,
        is_causal=True,
        deterministic=deterministic,
        **self._relative_tables("decoder"),
      )
    return self._logits(self.decoder_norm(x) if self._pre_norm else x)

  def start(
    self, source: Int[Array, "B S"] | None, batch: int, max_length: int
  ) -> None:
    """Runs the encoder and makes caches: collections 'memory' and 'cache'.

    Args:
      source: ids the encoder reads, or None.
      batch: sequences to decode: a multiple of the sources.
      max_length: positions to decode.
    """
    memory = None
    if source is not None:
      memory, mask = self._encode(source, deterministic=True)
      self.put_variable("memory", "mask", mask)
    for block in self.decoder:
      block.start(batch, max_length, memory)
    self.put_variable("cache", "index", jnp.zeros((batch,), jnp.int32))

  def decode(self, inputs: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Logits after one more id of each sequence; reads and writes 'cache'."""
    index = self.get_variable("cache", "index")
    mask = self.get_variable("memory", "mask")
    positions = index[:, None]
    x = self._embed_target(inputs[:, None], positions, deterministic=True)
    for block in self.decoder:
      x = block.decode(x, positions, mask, **self._relative_tables("decoder"))
    self.put_variable("cache", "index", index + 1)
    return self._logits(self.decoder_norm(x) if self._pre_norm else x)[:, 0]

  @property
  def _pre_norm(self):
    return self.config.norm == "pre"

  def _relative_tables(self, stack: str) -> dict[str, Any]:
    """What a stack's self-attentions add by distance: one table for all."""
    match self.config.position:
      case "t5":
        embedding = self.relative_bias[stack]
        bias = t5_bias(embedding, is_causal=stack == "decoder")
      case "alibi":
        lengths = {
          "encoder": self.max_source_length,
          "decoder": self.max_target_length,
        }
        bias = alibi_bias(self.config.num_heads, lengths[stack])
      case _:
        return {}
    return {"relative_bias": bias}

  def _encode(self, source, deterministic):
    check_length("source", source.shape[1], self.max_source_length)
    positions = np.arange(source.shape[1])[None, :]
    mask = (source != PAD_ID)[:, None, None, :]
    one_table = self.config.tie_embeddings and self.shared_vocabulary
    table = self.target_embedding if one_table else self.source_embedding
    learned = (
      self.source_positions if self.config.position == "learned" else None
    )
    x = self._embed(table, learned, source, positions, deterministic)
    for block in self.encoder:
      x = block(
        x,
        positions=positions,
        mask=mask,
        deterministic=deterministic,
        **self._relative_tables("encoder"),
      )
    return (self.encoder_norm(x) if self._pre_norm else x), mask

  def _embed_target(self, inputs, positions, deterministic):
    learned = (
      self.target_positions if self.config.position == "learned" else None
    )
    table = self.target_embedding
    return self._embed(table, learned, inputs, positions, deterministic)

  def _embed(self, table, learned, ids, positions, deterministic):
    features = self.config.features
    x = table(ids) * math.sqrt(features)
    if learned is not None:
      x = x + learned(positions) * math.sqrt(features)
    if self.config.position == "sinusoidal":
      encoding = position_encodings.sinusoidal(positions, features)
      x = x + encoding.astype(x.dtype)
    return self.dropout(x, deterministic=deterministic)

  def _logits(self, x):
    tied = self.config.tie_embeddings
    return tables.logits(
      x, self.target_embedding if tied else self.output_embedding
    )


def check_length(name: str, length: int, limit: int) -> None:
  """Raises ValueError where a sequence is longer than the model allows."""
  if length > limit:
    raise ValueError(
      f"{name}: {length} positions are more than the model's {limit}; shorten "
      "it or make a model with a larger maximum"
    )
