"""Recurrent decoders with attention, of Bahdanau et al. and of Luong et al.

With annotations h_1 … h_S of the source, the embedding e_t of the previous word, and
Attend(s) = Σ_j α_j(s) h_j by any mechanism, one step is

  Bahdanau   c_t = Attend(s_{t−1})         Luong   s_t = cell([e_t; h̃_{t−1}], s_{t−1})
             s_t = cell([e_t; c_t], s_{t−1})       c_t = Attend(s_t)
             h̃_t = maxout(W [s_t; c_t; e_t])       h̃_t = tanh(W [c_t; s_t])

and the softmax takes h̃_t. Luong's [e_t; h̃_{t−1}] is called input feeding.

Papers: Neural machine translation by jointly learning to align and translate,
appendix A, arXiv:1409.0473. Effective approaches to attention-based neural
machine translation, section 3, arXiv:1508.04025.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import Attention, Dims, attention_weights
from models.mechanism_variables import mechanism_variables
from projects.seq2seq.config import Seq2SeqConfig

Cells = Sequence[Any]
"""States of the cells, lowest layer first; the state of an LSTM is a pair (c, h)."""

FinalStates = Sequence[tuple[Any, Any]]
"""For each layer of the encoder, the final states of its two directions."""


class Annotations(NamedTuple):
  """The outputs of an encoder for a source.

  Attributes:
    values: `[B, S, F]`.
    mask: `[B, S]`, True at words.
  """

  values: Float[Array, "B S F"]
  mask: Bool[Array, "B S"]


class DecoderState(NamedTuple):
  """The state between two steps, in float32 for every dtype of the model.

  Attributes:
    cells: states of the cells.
    output: h̃ of the previous step, `[B, F]`; None in Bahdanau's decoder.
  """

  cells: Cells
  output: Float[Array, "B F"] | None


def make_cell(
  config: Seq2SeqConfig, features: int, name: str | None = None
) -> nn.RNNCellBase:
  """Creates a recurrent cell of the config's kind.

  Flax's GRU resets after the product, r ∘ (U h), like cuDNN's; the paper has U (r ∘ h).
  Both learn equally well.
  """
  cell = {"gru": nn.GRUCell, "lstm": nn.OptimizedLSTMCell}[config.cell]
  return cell(
    features,
    recurrent_kernel_init=_orthogonal,
    dtype=config.dtype,
    param_dtype=config.param_dtype,
    name=name,
  )


def _orthogonal(key, shape, dtype):
  # The factorisation supports only float32 and float64.
  return nn.initializers.orthogonal()(key, shape, jnp.float32).astype(dtype)


def hidden(state: Any) -> Float[Array, "B F"]:
  """Returns h of a cell's state: all of a GRU's, or the second half of an LSTM's."""
  return jax.tree.leaves(state)[-1]


class CrossAttention(nn.Module):
  """Attends from states to annotations, without a projection.

  Keys and values are the annotations, and queries are the states, as in both papers. So
  all parameters belong to the mechanism. Their name is 'attention', as in
  `MultiHeadAttention`.

  Attributes:
    attention: the mechanism.
    dims: the dimensions of the mechanism.
  """

  attention: Attention
  dims: Dims

  def setup(self) -> None:
    """Creates or reads the mechanism's variables."""
    self.mechanism = mechanism_variables(self, self.attention, self.dims)

  def __call__(
    self, queries: Float[Array, "BA F"], source: Annotations
  ) -> Float[Array, "BA F"]:
    """Computes the context of each state.

    Args:
      queries: `[B·A, F]`. The A hypotheses (beams) of an example are adjacent; they are
        queries of one call, so they share the annotations.
      source: annotations of B examples.

    Returns:
      `[B·A, F]`.
    """
    query, keys, mask = self._heads(queries, source)
    contexts = self.attention.apply(
      self.mechanism, query, keys, keys, mask=mask
    )
    return contexts.reshape(queries.shape)

  def sow_weights(
    self, queries: Float[Array, "B T F"], source: Annotations
  ) -> None:
    """Sows the matrix `[B, N, T, S]` if 'intermediates' is mutable."""
    if self.is_mutable_collection("intermediates"):
      query, keys, mask = self._heads(queries, source)
      apply = functools.partial(self.attention.apply, self.mechanism)
      weights = attention_weights(apply, query, keys, mask=mask)
      self.sow("intermediates", "attention_weights", weights)

  def _heads(self, queries, source):
    batch, length = source.mask.shape
    heads = (self.dims.num_heads, self.dims.head_dim)
    return (
      queries.reshape(batch, -1, *heads).astype(source.values.dtype),
      source.values.reshape(batch, length, *heads),
      source.mask[:, None, None, :],
    )


class Decoder(nn.Module):
  """Maps embeddings of the previous words to the inputs of the softmax.

  Attributes:
    config: config of the model.
    max_source_length: length of the longest source.
  """

  config: Seq2SeqConfig
  max_source_length: int

  def setup(self) -> None:
    """Creates the cells, the attention module and the projections."""
    config = self.config
    self.cells = [
      make_cell(config, config.features) for _ in range(config.num_layers)
    ]
    self.cross_attention = CrossAttention(
      config.attentions["cross_attention"][0].build(),
      Dims(
        config.num_heads,
        config.kv_heads,
        config.query_dim,
        self.max_source_length,
      ),
    )
    dense = functools.partial(
      nn.Dense, dtype=config.dtype, param_dtype=config.param_dtype
    )
    if self._attends_first:
      num_states = {"gru": 1, "lstm": 2}[config.cell]
      self.initial = [
        dense(num_states * config.features) for _ in range(config.num_layers)
      ]
      self.maxout = dense(2 * config.features)
    else:
      self.attentional = dense(config.features, use_bias=False)
    self.dropout = nn.Dropout(config.dropout_rate)

  def initial_state(self, final_states: FinalStates) -> DecoderState:
    """Computes the state before the first word from the encoder's final states.

    Bahdanau: tanh(W ←h_1), from the backward direction. Luong: the concatenated states
    of the two directions.
    """
    if self._attends_first:
      cells = []
      for dense, (_, backward) in zip(self.initial, final_states, strict=True):
        state = jnp.tanh(dense(hidden(backward))).astype(jnp.float32)
        if self.config.cell == "lstm":
          state = tuple(jnp.split(state, 2, axis=-1))
        cells.append(state)
      return DecoderState(tuple(cells), None)

    def join(*directions):
      return jnp.concatenate(directions, axis=-1)

    cells = tuple(
      jax.tree.map(join, *directions) for directions in final_states
    )
    return DecoderState(cells, jnp.zeros_like(hidden(cells[-1])))

  def __call__(
    self,
    state: DecoderState,
    embedded: Float[Array, "B T F"],
    source: Annotations,
    *,
    deterministic: bool = True,
  ) -> Float[Array, "B T F"]:
    """Computes h̃ of each position with teacher forcing, by a scan over time.

    Args:
      state: from `initial_state`.
      embedded: e_1 … e_T.
      source: the annotations to attend to.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.

    Returns:
      `[B, T, F]`.

    Cost: T steps, each with one call of the mechanism for one query per example;
    computations on the keys are repeated in each step.
    """

    def step(self, state, embedded, source):
      return self._step(state, embedded, source, deterministic)

    scan = nn.scan(
      step,
      variable_broadcast=("params", "constants"),
      split_rngs={"params": False, "dropout": True},
      in_axes=(1, nn.broadcast),
      out_axes=1,
    )
    _, (queries, outputs) = scan(self, state, embedded, source)
    # In one call, because each position depends only on its own query.
    self.cross_attention.sow_weights(queries, source)
    return self._project_output(outputs, embedded)

  def decode(
    self,
    state: DecoderState,
    embedded: Float[Array, "BA F"],
    source: Annotations,
  ) -> tuple[DecoderState, Float[Array, "BA F"]]:
    """Computes one step for A hypotheses of each example: the new state and h̃."""
    state, (_, output) = self._step(state, embedded, source, True)
    return state, self._project_output(output, embedded)

  @property
  def _attends_first(self):
    return self.config.decoder == "bahdanau"

  def _step(self, state, embedded, source, deterministic):
    """Computes the new state, and the query and the input of `_project_output`."""
    if self._attends_first:
      query = hidden(state.cells[-1])
      context = self.cross_attention(query, source)
      x = jnp.concatenate([embedded, context], axis=-1)
      cells, top = self._run_cells(state.cells, x, deterministic)
      output = jnp.concatenate([top, context.astype(top.dtype)], axis=-1)
      return DecoderState(cells, None), (query, output)
    previous = state.output.astype(embedded.dtype)
    x = jnp.concatenate([embedded, previous], axis=-1)
    cells, top = self._run_cells(state.cells, x, deterministic)
    context = self.cross_attention(top, source)
    features = jnp.concatenate([context, top.astype(context.dtype)], axis=-1)
    output = jnp.tanh(self.attentional(features))
    return DecoderState(cells, output.astype(jnp.float32)), (top, output)

  def _run_cells(self, states, x, deterministic):
    """Runs one step of each layer on the output of the layer below."""
    new = []
    for layer, (cell, state) in enumerate(zip(self.cells, states, strict=True)):
      if layer:
        x = self.dropout(x, deterministic=deterministic)
      state, x = cell(state, x)
      new.append(state)
    return tuple(new), x

  def _project_output(self, outputs, embedded):
    # Outside the scan, Bahdanau's projection is one product for all positions.
    if not self._attends_first:
      return outputs
    features = jnp.concatenate([outputs.astype(embedded.dtype), embedded], -1)
    pairs = self.maxout(features).reshape(*embedded.shape, 2)
    return jnp.max(pairs, axis=-1)
