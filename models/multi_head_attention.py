"""The slot: projections and heads around any attention mechanism."""

from collections.abc import Callable, Mapping
import functools
import math
import types
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
import numpy as np

from attention import Attention, Dims, attention_weights
from attention import rotary as rotate
from attention.recurrent.recurrence import for_values, unit_length
from models.mechanism_variables import mechanism_variables
from models.norms import RmsNormFromOne
from models.rows import where_rows
from models.short_convolution import ShortConvolution
from models.slot_config import SlotConfig

Positions = Int[Array | np.ndarray, "B T"]

Convolve = Callable[[ShortConvolution, Array], Array]
"""The method of a short convolution that a call of the slot needs."""

_NORMS = types.MappingProxyType(
  {
    "rms": nn.RMSNorm,
    "rms_joint": nn.RMSNorm,
    "rms_grouped": functools.partial(
      nn.RMSNorm, reduction_axes=-1, feature_axes=(-2, -1)
    ),
    "rms_from_one": RmsNormFromOne,
    "group": functools.partial(
      nn.LayerNorm, reduction_axes=-1, feature_axes=(-2, -1)
    ),
  }
)
"""`query_key_norm` or `output_norm` -> the norm, where it has variables."""


class MultiHeadAttention(nn.Module):
  """MultiHead(X, Y) = Attention(X·Wq, Y·Wk, Y·Wv) · Wo, for any `Attention`.

  Query, key and value have a kernel each: on a CPU that is as fast as a fused one,
  and self- and cross-attention then have the same parameters. A mechanism whose
  query is its key ('shared_qk') has no key projection, and one that makes its own
  keys and values ('own_keys') has none of values either.

  A mechanism's own variables are 'attention', in 'params' (trained) or 'constants'
  (not). Decoding keeps its cache in 'cache', and projected keys and values of an
  encoder in 'memory'. With 'intermediates' mutable, a call sows its matrix
  `[B, N, T, S]` as 'attention_weights', and with 'losses' mutable what its mechanism
  adds to the loss.

  Attributes:
    attention: the mechanism.
    dims: its sizes: heads, key/value heads, head dimension, longest key.
    features: width of the output.
    config: biases, norms, gates and widths of the slot.
    rotary: turn queries and keys by their positions.
    norm_epsilon: ε of the norms.
    dropout_rate: of attention weights.
    dtype: of activations.
    param_dtype: of parameters.
    out_scale: factor of the output kernel's initial values.

  Paper: Attention is all you need, section 3.2.2, arXiv:1706.03762.
  """

  attention: Attention
  dims: Dims
  features: int
  config: SlotConfig = SlotConfig()
  rotary: bool = False
  norm_epsilon: float = 1e-6
  dropout_rate: float = 0.0
  dtype: Any = None
  param_dtype: Any = "float32"
  out_scale: float = 1.0

  def setup(self) -> None:
    """Makes the projections and reads the mechanism's variables."""
    config = self.config
    value_dim = config.value_dim or self.dims.value_dim
    self.sizes = dims = self.dims._replace(value_dim=value_dim)
    self.projected = projected(self.attention, config, dims)
    norm_options = {
      "epsilon": self.norm_epsilon,
      "dtype": self.dtype,
      "param_dtype": self.param_dtype,
    }
    for name, shape in self.projected.items():
      features = math.prod(shape)
      setattr(self, name, self.dense(features))
      if config.short_convolution:
        convolution = ShortConvolution(
          features,
          self.dtype,
          self.param_dtype,
          config.short_convolution_bias,
        )
        setattr(self, f"{name}_short_convolution", convolution)
    if norm := _NORMS.get(config.query_key_norm):
      self.query_norm = norm(**norm_options)
      self.key_norm = norm(**norm_options)
    if norm := _NORMS.get(config.output_norm):
      self.out_norm = norm(**norm_options)
    if config.output_gate != "none":
      is_by_head = config.output_gate == "sigmoid_head"
      self.gate = self.dense(
        dims.num_heads * (1 if is_by_head else dims.values)
      )
    if config.exclusive and "value" not in self.projected:
      raise ValueError(
        "exclusive: expected a mechanism with values of the model, not one that "
        "makes its own"
      )
    scale, out_bias = self.out_scale, self.config.out_bias
    self.out = self.dense(self.features, kernel_init(scale), out_bias)
    self.mechanism = mechanism_variables(self, self.attention, dims)

  def __call__(
    self,
    inputs: Float[Array, "B T F"],
    memory: Float[Array, "B S F"] | None = None,
    *,
    positions: Positions | None = None,
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

    Raises:
      ValueError: the mechanism cannot honour an option.
    """
    memory = inputs if memory is None else memory
    sources = {"query": inputs, "key": memory, "value": memory}
    sources = self.sources(sources, positions, deterministic, call)

    def convolve(convolution, x):
      return convolution(x, call.get("mask"), call.get("query_segment_ids"))

    # Before the query, so that the gradients of query, key and value are added first
    # and devices along 'tensor' exchange one sum of them.
    gates = self._gates(inputs, positions)
    query = self.make_query(sources["query"], positions, convolve)
    key, value = self._key_value(sources, positions, convolve)
    if self.dropout_rate and not deterministic:
      call["dropout_rate"] = self.dropout_rate
      call["dropout_rng"] = self.make_rng("dropout")
    call |= self.options(inputs, call) | gates
    if self.is_mutable_collection("intermediates"):
      apply = functools.partial(self.attention.apply, self.mechanism)
      weights = attention_weights(apply, *every_head(query, key, value), **call)
      self.sow("intermediates", "attention_weights", weights)
    self._sow_loss(query, key, call)
    out = self.attend(query, key, value, inputs=inputs, **call)
    return self._merge(out, inputs, value)

  def _sow_loss(self, query, key, call):
    """What the mechanism adds to the loss of a step of training."""
    loss = self.attention.loss
    is_asked = self.is_mutable_collection("losses")
    if loss is not None and is_asked and not self.is_initializing():
      self.sow("losses", "attention", loss(self.mechanism, query, key, **call))

  def sources(
    self,
    sources: dict[str, Float[Array, "B S F"]],
    positions: Positions | None,
    deterministic: bool,
    call: dict[str, Any],
  ) -> dict[str, Float[Array, "B S F"]]:
    """What each is projected from; a subclass may change it, and read `call`."""
    del positions, deterministic, call
    return sources

  def options(
    self, inputs: Float[Array, "B T F"], call: Mapping[str, Any]
  ) -> dict[str, Any]:
    """What the slot itself adds to a call of the mechanism."""
    del inputs, call
    return self._scale

  def attend(
    self,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"] | None,
    value: Float[Array, "B S K H"] | None,
    *,
    inputs: Float[Array, "B T F"],
    **call: Any,
  ) -> Float[Array, "B T N H"]:
    """The mechanism itself: a method, so that `replace_attention` finds it."""
    del inputs
    return self.attention.apply(self.mechanism, query, key, value, **call)

  def start(self, batch: int, max_length: int) -> None:
    """Puts an empty cache for `max_length` positions in 'cache'."""
    init_cache = self.attention.init_cache
    if init_cache is None or "decode" not in self.attention.supports:
      raise ValueError(
        "decoder_attention: this mechanism cannot decode token by token; "
        "generate with one whose `supports` has 'decode'"
      )
    cache = init_cache(
      self.mechanism, batch, max_length, self.sizes, self.dtype
    )
    self.put_variable("cache", "attention", cache)
    for name in self.projected if self.config.short_convolution else ():
      getattr(self, f"{name}_short_convolution").start(batch)

  def prefill(
    self,
    inputs: Float[Array, "B P F"],
    positions: Positions,
    lengths: Int[Array, "B"],
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B P F"]:
    """A causal call on P positions, of which the first `lengths` are in 'cache'."""
    arrays = self._projections(
      inputs,
      positions,
      lambda convolution, x: convolution.prefill(x, lengths),
    )
    gates = self._gates(inputs, positions)
    call = tables | self.options(inputs, tables)
    out = self.attend(*arrays, inputs=inputs, is_causal=True, **call, **gates)
    cache = self.get_variable("cache", "attention")
    if self.attention.prefill is None:
      cache = self._decoded(cache, arrays, gates, lengths, call)
    else:
      cache = self.attention.prefill(
        self.mechanism, cache, *arrays, lengths, **self._scale, **gates
      )
    self.put_variable("cache", "attention", cache)
    return self._merge(out, inputs, arrays[2])

  def _decoded(self, cache, arrays, gates, lengths, call):
    """The cache after `decode` of one position after another."""
    decode = cast(Callable[..., Any], self.attention.decode)
    sequence = jax.tree.map(
      lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], (arrays, gates)
    )

    def step(cache, inputs):
      t, (now, gates) = inputs
      _, new = decode(self.mechanism, cache, *now, **call, **gates)
      return where_rows(t < lengths, new, cache), None

    steps = jnp.arange(arrays[0].shape[1])
    return jax.lax.scan(step, cache, (steps, sequence))[0]

  def decode(
    self,
    inputs: Float[Array, "B 1 F"],
    positions: Positions,
    **tables: Float[Array, "N D"],
  ) -> Float[Array, "B 1 F"]:
    """The next position of a causal call, with its tables by distance."""
    decode = cast(Callable[..., Any], self.attention.decode)
    arrays = self._projections(inputs, positions, ShortConvolution.decode)
    call = tables | self.options(inputs, tables)
    call |= self._gates(inputs, positions)
    cache = self.get_variable("cache", "attention")
    out, cache = decode(self.mechanism, cache, *arrays, **call)
    self.put_variable("cache", "attention", cache)
    return self._merge(out, inputs, arrays[2])

  def remember(self, memory: Float[Array, "B S F"]) -> None:
    """Projects an encoder's output once and keeps it in 'memory'."""
    key, value = self._key_value({"key": memory, "value": memory}, None)
    self.put_variable("memory", "key", key)
    self.put_variable("memory", "value", value)

  def recall(
    self,
    inputs: Float[Array, "BL 1 F"],
    mask: Bool[Array, "B 1 1 S"] | None,
  ) -> Float[Array, "BL 1 F"]:
    """Attends to what `remember` kept.

    Beams of an example, next to one another along the first axis, share its keys
    and values as queries of one call, which 'rowwise' mechanisms allow.
    """
    key = self.get_variable("memory", "key")
    value = self.get_variable("memory", "value")
    query = self.make_query(inputs, None)
    beams = query.reshape(key.shape[0], -1, *query.shape[2:])
    out = self.attention.apply(
      self.mechanism, beams, key, value, mask=mask, **self._scale
    )
    return self._merge(out.reshape(query.shape), inputs)

  @property
  def _scale(self) -> dict[str, float]:
    scale = self.config.attention_scale
    return {} if scale is None else {"scale": scale}

  @nn.nowrap
  def dense(
    self, size: int, init: Any = None, use_bias: bool | None = None
  ) -> nn.Dense:
    """A projection, with a bias where the config has one."""
    return nn.Dense(
      size,
      use_bias=self.config.attention_bias if use_bias is None else use_bias,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      kernel_init=init or kernel_init(),
    )

  def heads(
    self,
    name: str,
    inputs: Float[Array, "B T F"],
    convolve: Convolve | None = None,
  ) -> Float[Array, "B T N H"]:
    """A projection of the inputs, which `convolve` may mix along positions."""
    x = getattr(self, name)(inputs)
    if self.config.short_convolution and convolve is not None:
      x = convolve(getattr(self, f"{name}_short_convolution"), x)
    return x.reshape(*inputs.shape[:2], *self.projected[name])

  def make_query(
    self,
    inputs: Float[Array, "B T F"],
    positions: Positions | None,
    convolve: Convolve | None = None,
  ) -> Float[Array, "B T N H"]:
    """The queries, normed and turned by their positions."""
    query = self.heads("query", inputs, convolve)
    query = self._normed("query", query)
    if "own_keys" not in self.attention.supports:
      return self._shared(self._turned(query, positions))
    # Only what reads the shared key has positions.
    width = self._shared_width
    own, shared = jnp.split(query, [query.shape[-1] - width], axis=-1)
    return jnp.concatenate([own, self._turned(shared, positions)], axis=-1)

  def _key_value(self, sources, positions, convolve=None):
    """Keys, likewise, and values; None where the mechanism needs none."""
    key = value = None
    if "key" in self.projected:
      key = self.heads("key", sources["key"], convolve)
      key = self._shared(self._turned(self._normed("key", key), positions))
    if "value" in self.projected:
      value = self.heads("value", sources["value"], convolve)
    return key, value

  def _projections(self, inputs, positions, convolve):
    query = self.make_query(inputs, positions, convolve)
    sources = {"key": inputs, "value": inputs}
    return query, *self._key_value(sources, positions, convolve)

  def _normed(self, name, x):
    """A query or key of each head, as `query_key_norm` says."""
    kind = self.config.query_key_norm
    if kind == "none":
      return x
    if kind == "l2":
      return unit_length(x).astype(x.dtype)
    joint = x.reshape(*x.shape[:2], -1) if kind == "rms_joint" else x
    return getattr(self, f"{name}_norm")(joint).reshape(x.shape)

  def _turned(self, x, positions):
    if not self.rotary:
      return x
    config, scaling = self.config, self.config.rotary_scaling
    return rotate(
      x,
      positions,
      theta=config.rotary_theta,
      fraction=config.rotary_fraction,
      scaling=None if scaling is None else scaling.scaling,
    )

  def _shared(self, x):
    """Queries or keys of every head, where several share them."""
    shared = self.config.num_qk_heads
    if shared is None or "value_heads" in self.attention.supports:
      return x
    return jnp.repeat(x, self.dims.num_heads // shared, axis=2)

  def _gates(self, inputs, positions):
    """What the mechanism reads from the inputs, its own key with its position."""
    if self.attention.gates is None:
      return {}
    gates = dict(self.attention.gates(self.mechanism, inputs))
    if "shared_key" in gates:
      key = gates["shared_key"][:, :, None]
      self._check_pairs(key.shape[-1])
      gates["shared_key"] = self._turned(key, positions)[:, :, 0]
    return gates

  @property
  def _shared_width(self) -> int:
    """P of the key that all heads share."""
    gates = cast(Callable[..., Any], self.attention.gates)
    inputs = jax.ShapeDtypeStruct((1, 1, self.dims.features), jnp.float32)
    made = jax.eval_shape(gates, self.mechanism, inputs)
    width = made["shared_key"].shape[-1] if "shared_key" in made else 0
    self._check_pairs(width)
    return width

  def _check_pairs(self, width: int) -> None:
    """Raises ValueError where a shared key of this width cannot be turned."""
    if self.rotary and (width < 2 or width % 2):
      raise ValueError(
        "position: rotary turns pairs of the key that all heads share; expected "
        f"an even width of at least 2, got {width}"
      )

  def _merge(self, out, inputs, value: Any = None):
    """The output projection of each head's result, normed and gated."""
    kind, gate = self.config.output_norm, self.config.output_gate
    if self.config.exclusive:
      out = orthogonal_part(out, value)
    if kind in ("rms", "group"):
      out = self.out_norm(out)
    if gate != "none":
      function = getattr(jax.nn, gate.removesuffix("_head"))
      gates = function(self.gate(inputs))
      out = out * gates.reshape(*out.shape[:3], -1)
    out = out.reshape(*out.shape[:2], -1)
    if kind == "rms_joint":
      out = self.out_norm(out)
    if kind == "rms_grouped":
      groups = self.config.num_qk_heads or self.dims.num_heads
      grouped = out.reshape(*out.shape[:2], groups, -1)
      out = self.out_norm(grouped).reshape(out.shape)
    return self.out(out)


def projected(
  attention: Attention, config: SlotConfig, dims: Dims
) -> dict[str, tuple[int, int]]:
  """What a slot projects for a mechanism -> how many heads it has, how wide."""
  shared = config.num_qk_heads
  query = shared or dims.num_heads, dims.head_dim
  if "own_keys" in attention.supports:
    return {"query": query}
  value = dims.num_kv_heads, dims.values
  if "shared_qk" in attention.supports:
    return {"query": query, "value": value}
  key = shared or dims.num_kv_heads, dims.head_dim
  return {"query": query, "key": key, "value": value}


def every_head(
  query: Float[Array, "B T Q H"], key: Any, value: Any
) -> tuple[Array, Any]:
  """Query and key of as many heads as the values; a key or value of None stays so."""
  if value is None:
    return query, key
  key = key if key is None else for_values(key, value)
  return for_values(query, value), key


def orthogonal_part(
  out: Float[Array, "B T N V"], value: Float[Array, "B T K V"]
) -> Float[Array, "B T N V"]:
  """What of each result is orthogonal to the value at its position."""
  value = jnp.repeat(value, out.shape[2] // value.shape[2], axis=2)
  wide, own = out.astype(jnp.float32), unit_length(value)
  along = jnp.sum(wide * own, axis=-1, keepdims=True)
  return (wide - along * own).astype(out.dtype)


def kernel_init(scale: float = 1.0):
  """Normal with standard deviation `scale` / √fan_in, truncated."""
  return nn.initializers.variance_scaling(
    scale**2, "fan_in", "truncated_normal"
  )
