"""The recurrent encoder-decoder, with the same interface as the Transformer."""

from collections.abc import Mapping
import functools
import math
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from models import embeddings
from models.config import PAD_ID
from models.kind import Sizes
from models.sizes import (
  batch_array,
  check_length,
  id_sizes,
  without_negative_ids,
)
from projects.seq2seq.config import Seq2SeqConfig
from projects.seq2seq.decoder import (
  Annotations,
  Decoder,
  FinalStates,
  make_cell,
)


class Encoder(nn.Module):
  """Bidirectional recurrent layers.

  h_j = [→h_j; ←h_j]. Each direction has half the width, so that annotations, decoder
  states and all layers have the same width.

  Attributes:
    config: config of the model.

  Paper: Neural machine translation by jointly learning to align and
  translate, section 3.2, arXiv:1409.0473.
  """

  config: Seq2SeqConfig

  @nn.compact
  def __call__(
    self,
    x: Float[Array, "B S F"],
    mask: jax.Array,
    *,
    deterministic: bool = True,
  ) -> tuple[Float[Array, "B S F"], FinalStates]:
    """Computes the annotations, and the final states of each layer's directions.

    Args:
      x: embeddings of the source.
      mask: `[B, S]`, True at words. States do not change elsewhere, so padding may be
        at any position.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.
    """
    config, final_states = self.config, []
    for layer in range(config.num_layers):
      if layer:
        x = nn.Dropout(config.dropout_rate)(x, deterministic=deterministic)
      states, outputs = zip(
        *(
          _run_cell(
            make_cell(config, config.features // 2, f"{direction}_{layer}"),
            x,
            mask,
            reverse=direction == "backward",
          )
          for direction in ("forward", "backward")
        ),
        strict=True,
      )
      final_states.append(states)
      x = jnp.concatenate(outputs, axis=-1).astype(x.dtype)
    return x, final_states


def _run_cell(cell, x, mask, *, reverse):
  """Runs a cell over a sequence; returns its final state, and h of every position.

  In contrast, `nn.RNN` needs all padding at the end, stores the states of all positions
  to select the final one, and returns the state after padding for an empty row.
  """

  def step(cell, state, inputs):
    x, is_word = inputs
    new, output = cell(state, x)
    new = jax.tree.map(
      lambda new, old: jnp.where(is_word[:, None], new, old), new, state
    )
    return new, output

  scan = nn.scan(
    step,
    variable_broadcast="params",
    split_rngs={"params": False},
    in_axes=1,
    out_axes=1,
    reverse=reverse,
  )
  # The initial state is zero, so the key is not used.
  zeros = cell.initialize_carry(jax.random.key(0), x[:, 0].shape)
  zeros = jax.tree.map(lambda x: x.astype(jnp.float32), zeros)
  return scan(cell, zeros, (x, mask))


class Seq2Seq(nn.Module):
  """Maps ids to logits with recurrent cells and attention.

  Embedding tables and softmax are those of `Transformer`; only the layers differ.

  Attributes:
    config: config of the model.
    source_vocab_size: number of source ids.
    target_vocab_size: V, the number of target ids and of logits.
    max_source_length: length of the longest source.
    max_target_length: length of the longest target.
    shared_vocabulary: whether source and target share one vocabulary.
  """

  config: Seq2SeqConfig
  source_vocab_size: int
  target_vocab_size: int
  max_source_length: int
  max_target_length: int
  shared_vocabulary: bool = False

  @nn.nowrap
  def arguments(
    self, batch: Mapping[str, Any]
  ) -> tuple[tuple[Array, Array], dict[str, Any]]:
    """Returns the positional and keyword arguments of a call on a batch."""
    return (batch_array(batch, "source"), batch_array(batch, "inputs")), {}

  @nn.nowrap
  def example(self) -> dict[str, np.ndarray]:
    """Returns a batch whose shapes `initialize` uses."""
    ids = np.ones((1, 1), np.int32)
    return {"source": ids, "inputs": ids}

  def setup(self) -> None:
    """Creates the tables, the encoder and the decoder."""
    config = self.config
    table = functools.partial(
      embeddings.token_table,
      features=config.features,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
    )
    self.target_embedding = table(self.target_vocab_size)
    if not (config.tie_embeddings and self.shared_vocabulary):
      self.source_embedding = table(self.source_vocab_size)
    if not config.tie_embeddings:
      self.output_embedding = table(self.target_vocab_size)
    self.encoder = Encoder(config)
    self.decoder = Decoder(config, self.max_source_length)
    self.dropout = nn.Dropout(config.dropout_rate)

  def __call__(
    self,
    source: Int[Array, "B S"],
    inputs: Int[Array, "B T"],
    *,
    deterministic: bool = True,
  ) -> Float[Array, "B T V"]:
    """Computes the logits of each position from the inputs up to it.

    Args:
      source: ids of the encoder, padded with `PAD_ID`.
      inputs: ids of the decoder.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.

    Returns:
      `[B, T, V]` float32.

    Raises:
      ValueError: a sequence is longer than the model allows.
    """
    check_length("inputs", inputs.shape[1], self.max_target_length)
    annotations, final_states = self._encode(source, deterministic)
    outputs = self.decoder(
      self.decoder.initial_state(final_states),
      self._embed(self.target_embedding, inputs, deterministic),
      annotations,
      deterministic=deterministic,
    )
    return self._logits(self.dropout(outputs, deterministic=deterministic))

  def start(
    self, source: Int[Array, "B S"], batch: int, max_length: int
  ) -> None:
    """Runs the encoder, and creates the collections 'memory' and 'cache'.

    Args:
      source: ids of the encoder.
      batch: number of sequences to decode, a multiple of the number of sources.
      max_length: number of positions to decode, which does not affect the size of the
        state.
    """
    check_length("max_length", max_length, self.max_target_length)
    annotations, final_states = self._encode(source, deterministic=True)
    self.put_variable("memory", "annotations", annotations)
    beams = batch // len(source)
    state = jax.tree.map(
      lambda x: jnp.repeat(x, beams, axis=0),
      self.decoder.initial_state(final_states),
    )
    self.put_variable("cache", "state", state)

  def decode(self, inputs: Int[Array, "B"]) -> Float[Array, "B V"]:
    """Computes the logits after one more id of each sequence, and updates 'cache'."""
    state, output = self.decoder.decode(
      self.get_variable("cache", "state"),
      self._embed(self.target_embedding, inputs, deterministic=True),
      self.get_variable("memory", "annotations"),
    )
    self.put_variable("cache", "state", state)
    return self._logits(output)

  def _encode(self, source, deterministic):
    check_length("source", source.shape[1], self.max_source_length)
    one_table = self.config.tie_embeddings and self.shared_vocabulary
    table = self.target_embedding if one_table else self.source_embedding
    mask = source != PAD_ID
    x = self._embed(table, source, deterministic)
    values, final_states = self.encoder(x, mask, deterministic=deterministic)
    return Annotations(values, mask), final_states

  def _embed(self, table, ids, deterministic):
    ids = without_negative_ids(ids, table.num_embeddings, None)
    x = table(ids) * math.sqrt(self.config.features)
    return self.dropout(x, deterministic=deterministic)

  def _logits(self, x):
    tied = self.config.tie_embeddings
    return embeddings.logits(
      x, self.target_embedding if tied else self.output_embedding
    )


def create(config: Seq2SeqConfig, sizes: Sizes) -> Seq2Seq:
  """Creates the model for a task's sizes, without computing anything.

  Raises:
    ValueError: as in `models.sizes.id_sizes`.
  """
  return Seq2Seq(config, *id_sizes(config, sizes))
