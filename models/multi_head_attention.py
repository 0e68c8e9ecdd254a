"""The slot: projections and heads around any attention mechanism."""

from collections.abc import Callable, Mapping
import functools
import types
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import Attention, Dims, attention_weights
from attention import rotary as rotate
from attention.gates import unit_length
from models.mechanism_variables import mechanism_variables
from models.norms import RmsNormFromOne
from models.rows import by_rows, where_rows
from models.short_convolution import WIDTH as SHORT_WIDTH
from models.short_convolution import ShortConvolution, last

GATES = types.MappingProxyType({"silu": jax.nn.silu, "sigmoid": jax.nn.sigmoid})
"""The functions that `config.OUTPUT_GATES` names."""


class MultiHeadAttention(nn.Module):
  """MultiHead(X, Y) = Attention(X·Wq, Y·Wk, Y·Wv) · Wo, for any `Attention`.

  The projections have no bias unless asked, as in the paper's formula. Query,
  key and value have a kernel each: on a CPU that is as fast as a fused one, and
  self- and cross-attention then have the same parameters.

  A mechanism whose query is its key ('shared_qk') has no key projection, and one
  that makes its own keys and values ('own_keys') has none of values either.

  A mechanism's own variables live under the name 'attention', in 'params'
  (trained) or 'constants' (not). Decoding keeps the mechanism's cache in the
  collection 'cache' and projected keys and values of an encoder in 'memory'.
  With 'intermediates' mutable, a call sows its matrix `[B, N, T, S]` as
  'attention_weights'.

  Attributes:
    attention: the mechanism.
    dims: its sizes: heads, key/value heads, head dimension, longest key.
    features: width of the output.
    value_dim: width of each head's value; None is the head dimension.
    qk_heads: heads of queries and keys, each for as many neighbouring heads of
      values; None has one for each.
    use_bias: whether the projections have biases.
    scale: factor of the logits; None is the mechanism's own.
    query_key_norm: of each head's query and key: 'rms', by their root mean square
      and with a trained scale, 'rms_from_one', with what that has beyond 1,
      'rms_joint', by that of all heads together, 'l2', to length 1, or 'none'.
    output_norm: of each head's result: 'rms', 'group', by mean and variance with a
      scale and a bias for every feature, or 'none'; or 'rms_joint', of all heads
      together and after the gate.
    output_gate: what multiplies the normed result: 'silu' or 'sigmoid' of another
      projection of the inputs, or 'none'.
    norm_epsilon: ε of these norms.
    short_convolution: convolve queries, keys and values with the positions before
      them, ahead of norms and rotary positions.
    short_convolution_bias: these have biases.
    rotary: turn queries and keys by their positions.
    rotary_theta: θ of these.
    rotary_fraction: share of the head dimension that they turn.
    dropout_rate: of attention weights.
    dtype: of activations.
    param_dtype: of parameters.
    out_scale: factor of the output kernel's initial values.

  Paper: Attention is all you need, section 3.2.2, arXiv:1706.03762.
  """

  attention: Attention
  dims: Dims
  features: int
  value_dim: int | None = None
  qk_heads: int | None = None
  use_bias: bool = False
  scale: float | None = None
  query_key_norm: str = "none"
  output_norm: str = "none"
  output_gate: str = "none"
  norm_epsilon: float = 1e-6
  short_convolution: bool = False
  short_convolution_bias: bool = False
  rotary: bool = False
  rotary_theta: float = 10000.0
  rotary_fraction: float = 1.0
  dropout_rate: float = 0.0
  dtype: Any = None
  param_dtype: Any = "float32"
  out_scale: float = 1.0

  def setup(self) -> None:
    """Makes the projections and reads the mechanism's variables."""
    dense = functools.partial(
      nn.Dense,
      use_bias=self.use_bias,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
    )
    head_dim, value_dim = self.dims.head_dim, self._value_dim
    self.query = dense((self.qk_heads or self.dims.num_heads) * head_dim)
    if "key" in self.projected:
      self.key = dense((self.qk_heads or self.dims.num_kv_heads) * head_dim)
    if "value" in self.projected:
      self.value = dense(self.dims.num_kv_heads * value_dim)
    of_norm = {
      "epsilon": self.norm_epsilon,
      "dtype": self.dtype,
      "param_dtype": self.param_dtype,
    }
    if self.query_key_norm in ("rms", "rms_joint"):
      self.query_norm = nn.RMSNorm(**of_norm)
      self.key_norm = nn.RMSNorm(**of_norm)
    elif self.query_key_norm == "rms_from_one":
      self.query_norm = RmsNormFromOne(**of_norm)
      self.key_norm = RmsNormFromOne(**of_norm)
    if self.output_norm in ("rms", "rms_joint"):
      self.out_norm = nn.RMSNorm(**of_norm)
    elif self.output_norm == "group":
      self.out_norm = nn.LayerNorm(
        reduction_axes=-1, feature_axes=(-2, -1), **of_norm
      )
    if self.output_gate != "none":
      self.gate = dense(self.dims.num_heads * value_dim)
    if self.short_convolution:
      convolve = functools.partial(
        ShortConvolution,
        self.dtype,
        self.param_dtype,
        self.short_convolution_bias,
      )
      for name in self.projected:
        setattr(self, f"{name}_short_convolution", convolve())
    self.out = dense(self.features, kernel_init=kernel_init(self.out_scale))
    dims = self.dims._replace(value_dim=self._value_dim)
    self.mechanism = mechanism_variables(self, self.attention, dims)

  def __call__(
    self,
    inputs: Float[Array, "B T F"],
    memory: Float[Array, "B S F"] | None = None,
    *,
    positions: Int[Array | np.ndarray, "B T"] | None = None,
    deterministic: bool = True,
    **call: Any,
  ) -> Float[Array, "B T F"]:
    """Attends from `inputs` to `memory`, or to itself where that is None.

    Args:
      inputs: `[B, T, F]`, of any width.
      memory: `[B, S, F]`, of any width.
      positions: `[B, T]` or `[1, T]`, for rotary.
      deterministic: no dropout; otherwise the rng 'dropout' is needed.
      **call: `mask`, `is_causal`, `query_segment_ids`, …: the mechanism's call.

    Returns:
      `[B, T, F]`.

    Raises:
      ValueError: the mechanism cannot honour an option.
    """
    memory = inputs if memory is None else memory
    reads = {"query": inputs, "key": memory, "value": memory}
    return self.attend_from(inputs, reads, positions, deterministic, call)

  def attend_from(
    self,
    inputs: Float[Array, "B T F"],
    reads: Mapping[str, Float[Array, "B S F"]],
    positions: Int[Array | np.ndarray, "B T"] | None,
    deterministic: bool,
    call: dict[str, Any],
  ) -> Float[Array, "B T F"]:
    """As a call, with what query, key and value are each projected from.

    Gates, of the mechanism and of the output, are projected from `inputs`.
    """
    convolve = functools.partial(
      self._convolved_shortly,
      segment_ids=call.get("query_segment_ids"),
      mask=call.get("mask"),
    )
    query = self.make_query(reads["query"], positions, convolve)
    key, value = self._key_value(
      reads["key"], positions, reads["value"], convolve
    )
    if self.dropout_rate and not deterministic:
      call["dropout_rate"] = self.dropout_rate
      call["dropout_rng"] = self.make_rng("dropout")
    call = call | self.options(inputs, call) | self._gates(inputs, positions)
    apply = functools.partial(self.attention.apply, self.mechanism)
    if self.is_mutable_collection("intermediates"):
      weights = attention_weights(apply, query, key, **call)
      self.sow("intermediates", "attention_weights", weights)
    out = self.attend(query, key, value, inputs=inputs, **call)
    return self._merge(out, inputs)

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """What the slot itself adds to a call of the mechanism."""
    del inputs, call
    return {} if self.scale is None else {"scale": self.scale}

  def attend(
    self,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"] | None,
    value: Float[Array, "B S K H"] | None,
    *,
    inputs: Float[Array, "B T F"],
    **call: Any,
  ) -> Float[Array, "B T N H"]:
    """The mechanism itself: a method, so that `replace_attention` finds it.

    `inputs` are what the arrays are projected from, for the gates of another one.
    """
    del inputs
    return self.attention.apply(self.mechanism, query, key, value, **call)

  def start(self, batch: int, max_length: int) -> None:
    """Puts an empty cache for `max_length` positions in 'cache'."""
    if self.attention.init_cache is None:
      raise ValueError(
        "decoder_attention: this mechanism cannot decode token by token; "
        "generate with one whose `supports` has 'decode'"
      )
    dims = self.dims._replace(value_dim=self._value_dim)
    cache = self.attention.init_cache(
      self.mechanism, batch, max_length, dims, self.dtype
    )
    self.put_variable("cache", "attention", cache)
    if self.short_convolution:
      sizes = {name: getattr(self, name).features for name in self.projected}
      shape = batch, SHORT_WIDTH - 1
      nothing = {
        name: jnp.zeros((*shape, size), self.dtype)
        for name, size in sizes.items()
      }
      self.put_variable("cache", "short_convolution", nothing)

  def prefill(
    self,
    inputs: Float[Array, "B P F"],
    positions: Int[Array | np.ndarray, "1 P"],
    lengths: Int[Array, "B"],
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B P F"]:
    """A causal call on the first P positions, of which `lengths` are in 'cache'.

    `tables` are as in `decode`.
    """
    read = {}

    def convolve(name, x):
      read[name] = last(x, lengths)
      return self._convolved_shortly(name, x)

    query = self.make_query(inputs, positions, convolve)
    key, value = self._key_value(inputs, positions, convolve=convolve)
    if self.short_convolution:
      self.put_variable("cache", "short_convolution", read)
    arrays, gates = (query, key, value), self._gates(inputs, positions)
    call = tables | self.options(inputs, tables)
    out = self.attend(*arrays, inputs=inputs, is_causal=True, **call, **gates)
    cache = self.get_variable("cache", "attention")
    if self.attention.prefill is None:
      cache = self._filled(cache, arrays, gates, lengths, call)
    else:
      options = {"scale": self.scale} if self.scale is not None else {}
      cache = self.attention.prefill(
        self.mechanism,
        cache,
        *arrays,
        lengths,
        **options,
        **gates,
      )
    self.put_variable("cache", "attention", cache)
    return self._merge(out, inputs)

  def _filled(self, cache, arrays, gates, lengths, call):
    """The cache after `decode` of one position after another."""
    decode = cast(Callable[..., Any], self.attention.decode)
    in_time = jax.tree.map(
      lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], (arrays, gates)
    )

    def step(cache, at):
      t, (now, gates) = at
      _, after = decode(self.mechanism, cache, *now, **call, **gates)
      return where_rows(t < lengths, after, cache), None

    steps = jnp.arange(arrays[0].shape[1])
    return jax.lax.scan(step, cache, (steps, in_time))[0]

  def _gates(self, inputs, positions):
    """What the mechanism reads from the inputs, its own key with its position."""
    if self.attention.gates is None:
      return {}
    gates = dict(self.attention.gates(self.mechanism, inputs))
    if "shared_key" in gates:
      key = gates["shared_key"][:, :, None]
      gates["shared_key"] = self._turned(key, positions)[:, :, 0]
    return gates

  def decode(
    self,
    inputs: Float[Array, "B 1 F"],
    positions: Int[Array, "B 1"],
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B 1 F"]:
    """The next position of a causal call; reads and writes 'cache'.

    `tables` are what the call has of 'relative' in addition to the slot's own
    keys.
    """
    decode = cast(Callable[..., Any], self.attention.decode)
    before = self.get_variable("cache", "short_convolution")
    after = {}

    def convolve(name, x):
      after[name] = jnp.concatenate([before[name][:, 1:], x], axis=1)
      return self._convolved_shortly(name, x, before=before[name])

    key, value = self._key_value(inputs, positions, convolve=convolve)
    cache = self.get_variable("cache", "attention")
    query = self.make_query(inputs, positions, convolve)
    call = tables | self.options(inputs, tables)
    call |= self._gates(inputs, positions)
    out, cache = decode(self.mechanism, cache, query, key, value, **call)
    self.put_variable("cache", "attention", cache)
    if self.short_convolution:
      self.put_variable("cache", "short_convolution", after)
    return self._merge(out, inputs)

  def remember(self, memory: Float[Array, "B S F"]) -> None:
    """Projects an encoder's output once and keeps it in 'memory'."""
    key, value = self._key_value(memory, None)
    self.put_variable("memory", "key", key)
    self.put_variable("memory", "value", value)

  def recall(
    self,
    inputs: Float[Array, "BL 1 F"],
    mask: Bool[Array, "B 1 1 S"] | None,
  ) -> Float[Array, "BL 1 F"]:
    """Attends to what `remember` kept.

    Each example may have several hypotheses (beams), next to one another along
    the first axis. They share one copy of keys and values: they are the queries
    of one call, which any mechanism that is 'rowwise' allows.
    """
    key = self.get_variable("memory", "key")
    value = self.get_variable("memory", "value")
    query = self.make_query(inputs, None)
    beams = query.reshape(key.shape[0], -1, *query.shape[2:])
    call = {} if self.scale is None else {"scale": self.scale}
    out = self.attention.apply(
      self.mechanism, beams, key, value, mask=mask, **call
    )
    return self._merge(out.reshape(query.shape), inputs)

  def make_query(
    self,
    inputs: Float[Array, "B T F"],
    positions: Int[Array | np.ndarray, "B T"] | None,
    convolve: Callable[..., Array] | None = None,
  ) -> Float[Array, "B T N H"]:
    """The queries, normed and turned by their positions."""
    heads = self.qk_heads or self.dims.num_heads
    query = self.heads("query", inputs, heads, convolve)
    query = self._normed("query", query)
    if "own_keys" not in self.attention.supports:
      return self._shared(self._turned(query, positions))
    # Only what reads the shared key has positions.
    width = self._shared_width
    own, shared = jnp.split(query, [query.shape[-1] - width], axis=-1)
    return jnp.concatenate([own, self._turned(shared, positions)], axis=-1)

  @property
  def _shared_width(self) -> int:
    """P of the key that all heads share."""
    gates = cast(Callable[..., Any], self.attention.gates)
    inputs = jax.ShapeDtypeStruct((1, 1, self.dims.features), jnp.float32)
    found = jax.eval_shape(gates, self.mechanism, inputs)
    width = found["shared_key"].shape[-1] if "shared_key" in found else 0
    if self.rotary and (width < 2 or width % 2):
      raise ValueError(
        "position: rotary turns pairs of the key that all heads share; expected "
        f"an even width of at least 2, got {width}"
      )
    return width

  def _normed(self, name, x):
    """A query or key of each head, as `query_key_norm` says."""
    if self.query_key_norm in ("rms", "rms_from_one"):
      return getattr(self, f"{name}_norm")(x)
    if self.query_key_norm == "rms_joint":
      joint = x.reshape(*x.shape[:2], -1)
      return getattr(self, f"{name}_norm")(joint).reshape(x.shape)
    if self.query_key_norm == "l2":
      return unit_length(x).astype(x.dtype)
    return x

  @property
  def projected(self) -> tuple[str, ...]:
    """What the slot projects for the mechanism."""
    if "own_keys" in self.attention.supports:
      return ("query",)
    if "shared_qk" in self.attention.supports:
      return "query", "value"
    return "query", "key", "value"

  def _convolved_shortly(self, name, x, mask=None, **options):
    if mask is not None and mask.shape[1:3] == (1, 1):
      # A hidden position is hidden from the convolution of later ones as well.
      x = jnp.where(mask[:, 0, 0, :, None], x, 0.0)
    return getattr(self, f"{name}_short_convolution")(x, **options)

  def _key_value(self, inputs, positions, of_value=None, convolve=None):
    if "value" not in self.projected:
      return None, None
    of_value = inputs if of_value is None else of_value
    value = self.heads("value", of_value, self.dims.num_kv_heads, convolve)
    if "key" not in self.projected:
      return None, value
    heads = self.qk_heads or self.dims.num_kv_heads
    key = self._normed("key", self.heads("key", inputs, heads, convolve))
    return self._shared(self._turned(key, positions)), value

  def _shared(self, x):
    """Queries or keys of every head, where several share them."""
    if self.qk_heads is None:
      return x
    return jnp.repeat(x, self.dims.num_heads // self.qk_heads, axis=2)

  @property
  def _value_dim(self) -> int:
    return self.value_dim or self.dims.head_dim

  def _turned(self, x, positions):
    if not self.rotary:
      return x
    return rotate(
      x, positions, theta=self.rotary_theta, fraction=self.rotary_fraction
    )

  def heads(
    self,
    name: str,
    inputs: Float[Array, "B T F"],
    num_heads: int,
    convolve: Callable[..., Array] | None = None,
  ) -> Float[Array, "B T N H"]:
    """A projection of the inputs, which `convolve` may mix along positions."""
    x = by_rows(getattr(self, name), inputs)
    if self.short_convolution and convolve is not None:
      x = convolve(name, x)
    return x.reshape(*inputs.shape[:2], num_heads, -1)

  def _merge(self, out, inputs):
    """The output projection of each head's result, normed and gated."""
    joint = self.output_norm == "rms_joint"
    if self.output_norm != "none" and not joint:
      out = self.out_norm(out)
    out = out.reshape(*out.shape[:2], -1)
    if self.output_gate != "none":
      out = out * GATES[self.output_gate](by_rows(self.gate, inputs))
    if joint:
      out = self.out_norm(out)
    return by_rows(self.out, out)


def kernel_init(scale: float = 1.0):
  """Normal with standard deviation `scale` / √fan_in, truncated."""
  return nn.initializers.variance_scaling(
    scale**2, "fan_in", "truncated_normal"
  )
