"""Multi-head attention with any mechanism."""

from collections.abc import Callable, Mapping
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import attention_weights
from attention.recurrent.recurrence import repeat_heads
from models.head_projections import HeadProjections, Positions
from models.kind import NOTHING
from models.mechanism_variables import mechanism_variables
from models.rows import where_rows
from models.short_convolution import ShortConvolution


def apply_mechanism(
  module: "MultiHeadAttention",
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"] | None,
  value: Float[Array, "B S K V"] | None,
  *,
  inputs: Float[Array, "B T F"] | None = None,
  gates: Mapping[str, Array] = NOTHING,
  **call: Any,
) -> Float[Array, "B T N V"]:
  """Calls the mechanism of an attention module.

  Args:
    module: has the mechanism and its variables.
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; None for a mechanism without a key projection.
    value: `[B, S, K, V]`; None for a mechanism that computes its own.
    inputs: `[B, T, F]`, from which the queries are projected; not used here.
    gates: the mechanism's gates, computed from the inputs.
    **call: `mask`, `is_causal`, …: options of the call.
  """
  del inputs
  return module.attention.apply(
    module.mechanism, query, key, value, **call, **gates
  )


class MultiHeadAttention(HeadProjections):
  """MultiHead(X, Y) = Attention(X·Wq, Y·Wk, Y·Wv) · Wo, for any `Attention`.

  The variables of the mechanism are 'attention', in 'params' (trained) or
  'constants' (not trained). Decoding stores its cache in 'cache', and projected keys
  and values of an encoder in 'memory'. If 'intermediates' is mutable, a call sows its
  attention matrix `[B, N, T, S]` as 'attention_weights'; if 'losses' is mutable, it
  sows the loss of its mechanism.

  It has the attributes of `HeadProjections` and:

  Attributes:
    dropout_rate: the dropout rate of attention weights.
    attend: calls the mechanism, with the signature of `apply_mechanism`.

  Paper: Attention is all you need, section 3.2.2, arXiv:1706.03762.
  """

  dropout_rate: float = 0.0
  attend: Callable[..., Array] = apply_mechanism

  def setup(self) -> None:
    """Creates the projections and the mechanism's variables."""
    if self.attention.reads_query_inputs and self.config.query_rank is None:
      raise ValueError(
        "query_rank: expected a rank, because this mechanism uses the features from "
        "which low-rank queries are projected, got None"
      )
    super().setup()
    self.mechanism = mechanism_variables(
      self, self.attention, self.mechanism_dims
    )

  def __call__(
    self,
    inputs: Float[Array, "B T F"],
    memory: Float[Array, "B S F"] | None = None,
    *,
    positions: Positions | None = None,
    deterministic: bool = True,
    gates: Mapping[str, Array] | None = None,
    **call: Any,
  ) -> Float[Array, "B T F"]:
    """Attends from `inputs` to `memory`, or to `inputs` if that is None.

    Args:
      inputs: `[B, T, F]`, of any width.
      memory: `[B, S, F]`, of any width.
      positions: `[B, T]` or `[1, T]`, for rotary.
      deterministic: whether dropout is off; otherwise the rng 'dropout' is needed.
      gates: of the mechanism; None computes them from the inputs.
      **call: `mask`, `is_causal`, `query_segment_ids`, …: options of the mechanism.

    Raises:
      ValueError: the mechanism does not support an option.
    """
    memory = inputs if memory is None else memory
    sources = {"query": inputs, "key": memory, "value": memory}
    sources = self.sources(sources, positions, deterministic, call)

    def convolve(convolution, x):
      return convolution(x, call.get("mask"), call.get("query_segment_ids"))

    # The gates come first, so that the gradients of query, key and value are added to
    # each other before that of the gates: devices along 'tensor' exchange only one sum.
    if gates is None:
      gates = self.make_gates(inputs, positions)
    query, key, value = self.project(sources, convolve)
    query, key = self.prepare(query, key, positions)
    if self.dropout_rate and not deterministic:
      call["dropout_rate"] = self.dropout_rate
      call["dropout_rng"] = self.make_rng("dropout")
    call = self.options(inputs, call)
    self._sow(query, key, value, {**call, **gates})
    out = self.attend(
      self, query, key, value, inputs=inputs, gates=gates, **call
    )
    return self.output(out, inputs, value)

  def _sow(self, query, key, value, call):
    """Sows the attention matrix and the mechanism's loss if they are mutable."""
    if self.is_mutable_collection("intermediates"):
      apply = functools.partial(self.attention.apply, self.mechanism)
      arrays = *every_head(query, key, value), value
      if self.attention.linear_in_values:
        arrays = arrays[:2]
      weights = attention_weights(apply, *arrays, **call)
      self.sow("intermediates", "attention_weights", weights)
    loss = self.attention.loss
    is_mutable = self.is_mutable_collection("losses")
    if loss is not None and is_mutable and not self.is_initializing():
      self.sow("losses", "attention", loss(self.mechanism, query, key, **call))

  def sources(
    self,
    sources: dict[str, Float[Array, "B S F"]],
    positions: Positions | None,
    deterministic: bool,
    call: dict[str, Any],
  ) -> dict[str, Float[Array, "B S F"]]:
    """Returns the inputs of each projection; a subclass may transform them."""
    del positions, deterministic, call
    return sources

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Returns the options of a call of the mechanism, with those of this module."""
    del inputs
    return {**call, **self._scale}

  def start(self, batch: int, max_length: int) -> None:
    """Stores an empty cache for `max_length` positions in 'cache'."""
    init_cache = self.attention.init_cache
    if init_cache is None or "decode" not in self.attention.supports:
      raise ValueError(
        "decoder_attention: this mechanism cannot decode token by token; "
        "generate with one whose `supports` has 'decode'"
      )
    cache = init_cache(
      self.mechanism, batch, max_length, self.mechanism_dims, self.dtype
    )
    self.put_variable("cache", "attention", cache)
    for name in self.projections if self.config.short_convolution else ():
      getattr(self, f"{name}_short_convolution").start(batch)

  def prefill(
    self,
    inputs: Float[Array, "B P F"],
    positions: Positions,
    lengths: Int[Array, "B"],
    gates: Mapping[str, Array] | None = None,
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B P F"]:
    """Attends causally over P positions; stores the first `lengths` in 'cache'."""
    arrays = self._qkv(
      inputs, positions, lambda convolution, x: convolution.prefill(x, lengths)
    )
    if gates is None:
      gates = self.make_gates(inputs, positions)
    call = self.options(inputs, tables)
    out = self.attend(
      self, *arrays, inputs=inputs, gates=gates, is_causal=True, **call
    )
    cache = self.get_variable("cache", "attention")
    if self.attention.prefill is None:
      cache = self._decode_steps(cache, arrays, gates, lengths, call)
    else:
      cache = self.attention.prefill(
        self.mechanism, cache, *arrays, lengths, **self._scale, **gates
      )
    self.put_variable("cache", "attention", cache)
    return self.output(out, inputs, arrays[2])

  def _decode_steps(self, cache, arrays, gates, lengths, call):
    """Fills a cache by `decode`, one position after another."""
    decode = cast(Callable[..., Any], self.attention.decode)
    sequence = jax.tree.map(
      lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], (arrays, gates)
    )

    def step(cache, inputs):
      t, (arrays, gates) = inputs
      _, new = decode(self.mechanism, cache, *arrays, **call, **gates)
      return where_rows(t < lengths, new, cache), None

    steps = jnp.arange(arrays[0].shape[1])
    return jax.lax.scan(step, cache, (steps, sequence))[0]

  def decode(
    self,
    inputs: Float[Array, "B 1 F"],
    positions: Positions,
    gates: Mapping[str, Array] | None = None,
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B 1 F"]:
    """Attends from the next position to 'cache', after adding the position to it."""
    decode = cast(Callable[..., Any], self.attention.decode)
    arrays = self._qkv(inputs, positions, ShortConvolution.decode)
    call = self.options(inputs, tables)
    if gates is None:
      gates = self.make_gates(inputs, positions)
    call |= gates
    cache = self.get_variable("cache", "attention")
    out, cache = decode(self.mechanism, cache, *arrays, **call)
    self.put_variable("cache", "attention", cache)
    return self.output(out, inputs, arrays[2])

  def project_memory(self, memory: Float[Array, "B S F"]) -> None:
    """Projects an encoder's output once and keeps it in 'memory'."""
    _, key, value = self.project({"key": memory, "value": memory})
    _, key = self.prepare(None, key, None)
    self.put_variable("memory", "key", key)
    self.put_variable("memory", "value", value)

  def attend_memory(
    self,
    inputs: Float[Array, "BL 1 F"],
    mask: Bool[Array, "B 1 1 S"] | None,
  ) -> Float[Array, "BL 1 F"]:
    """Attends to the keys and values that `project_memory` stored.

    The beams of an example are adjacent along the first axis. They share its keys
    and values as queries of one call, which 'rowwise' mechanisms allow.
    """
    key = self.get_variable("memory", "key")
    value = self.get_variable("memory", "value")
    query, _, _ = self.project({"query": inputs})
    query, _ = self.prepare(query, None, None)
    beams = query.reshape(key.shape[0], -1, *query.shape[2:])
    out = self.attention.apply(
      self.mechanism, beams, key, value, mask=mask, **self._scale
    )
    return self.output(out.reshape(query.shape), inputs)

  @property
  def _scale(self) -> dict[str, float]:
    scale = self.config.attention_scale
    return {} if scale is None else {"scale": scale}

  def _qkv(self, inputs, positions, convolve):
    """Computes the query, key and value of self-attention."""
    sources = dict.fromkeys(("query", "key", "value"), inputs)
    query, key, value = self.project(sources, convolve)
    return *self.prepare(query, key, positions), value

  def make_gates(
    self, inputs: Float[Array, "B T F"], positions: Positions | None
  ) -> dict[str, Array]:
    """Computes the mechanism's gates from the inputs, with its shared key rotated."""
    if self.attention.gates is None:
      return {}
    arrays = (inputs,)
    if self.attention.reads_query_inputs:
      arrays += (self._low_rank(inputs),)
    gates = dict(self.attention.gates(self.mechanism, *arrays))
    if not self.rotary:
      return gates
    if "shared_key" in gates:
      key = gates["shared_key"][:, :, None]
      self._check_pairs(key.shape[-1])
      gates["shared_key"] = self._rotate(key, positions)[:, :, 0]
    rotated = {"index_query_rotary", "index_key_rotary", "rotation"}
    for name in sorted(gates.keys() & rotated):
      # All of these features are rotated.
      gates[name] = self._rotate(gates[name], positions, fraction=1.0)
    return gates


def every_head(
  query: Float[Array, "B T Q H"], key: Any, value: Any
) -> tuple[Array, Any]:
  """Repeats queries and keys to the number of value heads; None stays None."""
  if value is None:
    return query, key
  key = key if key is None else repeat_heads(key, value)
  return repeat_heads(query, value), key
