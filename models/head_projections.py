"""Projections of an attention module: inputs to heads, and heads to outputs."""

from collections.abc import Callable, Mapping
import functools
import math
import types
from typing import Any, cast

from flax import linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
import numpy as np

from attention import Attention, Dims
from attention import rotary as rotate
from attention.latent import EPSILON as LATENT_EPSILON
from attention.recurrent.recurrence import unit_length
from models.attention_module_config import SlotConfig
from models.config import ACTIVATIONS
from models.norms import RmsNormFromOne
from models.short_convolution import ShortConvolution

Positions = Int[Array | np.ndarray, "B T"]

Convolve = Callable[[ShortConvolution, Array], Array]
"""Applies a short convolution to a projection: a call, `prefill` or `decode`."""

_grouped_norm = functools.partial(
  nn.RMSNorm, reduction_axes=-1, feature_axes=(-2, -1)
)
_NORMS = types.MappingProxyType(
  {
    "rms": nn.RMSNorm,
    "rms_joint": nn.RMSNorm,
    "rms_joint_first": nn.RMSNorm,
    "rms_grouped": _grouped_norm,
    "rms_grouped_first": _grouped_norm,
    "rms_from_one": RmsNormFromOne,
    "group": functools.partial(
      nn.LayerNorm, reduction_axes=-1, feature_axes=(-2, -1)
    ),
    "group_scale": functools.partial(
      nn.LayerNorm, reduction_axes=-1, feature_axes=(-2, -1), use_bias=False
    ),
  }
)
"""Maps each `query_key_norm` and `output_norm` that has variables to its module."""


class HeadProjections(nn.Module):
  """Projects inputs to queries, keys and values, and the results to outputs.

  It also normalizes and rotates queries and keys, and normalizes and gates results, as
  `config` says. Query, key and value have separate kernels: on a CPU this is as fast as
  a fused kernel, and self- and cross-attention have the same parameters. A mechanism
  that uses queries as keys ('shared_qk') has no key projection, and one that computes
  its own keys and values ('own_keys') has neither a key nor a value projection.

  Attributes:
    attention: the mechanism.
    dims: dimensions of the mechanism: heads, key/value heads, head dimension, …
    features: width of the output.
    config: biases, norms, gates and widths of the projections.
    rotary: whether queries and keys are rotated by their positions.
    norm_epsilon: ε of the norms.
    dtype: the dtype of activations.
    param_dtype: the dtype of parameters.
    out_scale: factor of the output kernel's initial values.
  """

  attention: Attention
  dims: Dims
  features: int
  config: SlotConfig = SlotConfig()
  rotary: bool = False
  norm_epsilon: float = 1e-6
  dtype: Any = None
  param_dtype: Any = "float32"
  out_scale: float = 1.0

  def setup(self) -> None:
    """Creates the projections, norms and gates."""
    config = self.config
    value_dim = config.value_dim or self.dims.value_dim
    self.mechanism_dims = dims = self.dims._replace(value_dim=value_dim)
    self.projections = projection_shapes(self.attention, config, dims)
    norm_options = {
      "epsilon": self.norm_epsilon,
      "dtype": self.dtype,
      "param_dtype": self.param_dtype,
    }
    for name, shape in self.projections.items():
      features = math.prod(shape)
      is_low_rank = (
        config.query_rank is not None and name == "query"
      ) or config.latent_rank is not None
      use_bias = False if is_low_rank else None
      setattr(self, name, self.projection(features, use_bias=use_bias))
      if config.short_convolution:
        convolution = ShortConvolution(
          features,
          self.dtype,
          self.param_dtype,
          config.short_convolution_bias,
          config.short_convolution_activation,
        )
        setattr(self, f"{name}_short_convolution", convolution)
    latent_norm = functools.partial(
      nn.RMSNorm, **norm_options | {"epsilon": LATENT_EPSILON}
    )
    if config.query_rank is not None:
      self.query_down = self.projection(config.query_rank)
      self.query_down_norm = latent_norm()
    if config.latent_rank is not None and "value" in self.projections:
      width = cast(int, config.shared_key_dim)
      self.latent_down = self.projection(config.latent_rank + width)
      self.latent_down_norm = latent_norm()
    if norm := _NORMS.get(config.query_key_norm):
      self.query_norm = norm(**norm_options)
      self.key_norm = norm(**norm_options)
    if norm := _NORMS.get(config.output_norm):
      if config.output_norm_epsilon is not None:
        norm_options["epsilon"] = config.output_norm_epsilon
      self.out_norm = norm(**norm_options)
    if config.query_temperature == "log":
      heads = self.projections["query"][0]
      ones = nn.initializers.ones
      self.temperature_scale = self.param(
        "temperature_scale", ones, (heads,), self.param_dtype
      )
    if config.output_gate != "none":
      is_per_head = config.output_gate == "sigmoid_head"
      if config.output_gate_rank is not None:
        self.gate_down = self.projection(config.output_gate_rank)
      self.gate = self.projection(
        dims.num_heads * (1 if is_per_head else dims.values)
      )
    if config.exclusive and "value" not in self.projections:
      raise ValueError(
        "exclusive: expected a mechanism with values of the model, not one that "
        "computes its own"
      )
    if config.out_groups is not None:
      width = dims.num_heads * dims.values // config.out_groups
      self.out_down = self.param(
        "out_down",
        nn.initializers.variance_scaling(
          1.0, "fan_in", "truncated_normal", batch_axis=(0,)
        ),
        (config.out_groups, width, config.out_rank),
        self.param_dtype,
      )
    self.out = self.projection(self.features, config.out_bias, self.out_scale)

  @nn.nowrap
  def projection(
    self, size: int, use_bias: bool | None = None, scale: float = 1.0
  ) -> nn.Dense:
    """Creates a dense layer; its kernel has initial deviation `scale` / √fan_in.

    `use_bias` defaults to the config's `attention_bias`.
    """
    return nn.Dense(
      size,
      use_bias=self.config.attention_bias if use_bias is None else use_bias,
      dtype=self.dtype,
      param_dtype=self.param_dtype,
      kernel_init=kernel_init(scale),
    )

  def project(
    self,
    sources: Mapping[str, Float[Array, "B T F"]],
    convolve: Convolve | None = None,
  ) -> tuple[Any, Any, Any]:
    """Projects inputs to the heads of query, key and value.

    Args:
      sources: 'query', 'key' and 'value' -> the inputs `[B, T, F]` of each.
      convolve: applies the short convolution, if there is one.

    Returns:
      query `[B, T, N, H]`, key `[B, S, K, H]`, value `[B, S, K, V]`; None for each that
      has no source or no projection.
    """
    sources, shared = self._latents(sources)
    query, key, value, _ = self.config.projection_factors
    factors = {"query": query, "key": key, "value": value}

    def heads(name):
      if name not in sources or name not in self.projections:
        return None
      x = getattr(self, name)(sources[name])
      if factors[name] != 1.0:
        x = factors[name] * x
      if self.config.short_convolution and convolve is not None:
        x = convolve(getattr(self, f"{name}_short_convolution"), x)
      if self.config.projection_activation != "none":
        x = ACTIVATIONS[self.config.projection_activation](x)
      return x.reshape(*x.shape[:2], *self.projections[name])

    query, key, value = heads("query"), heads("key"), heads("value")
    if key is not None and shared is not None:
      shape = (*key.shape[:3], shared.shape[2])
      shared = jnp.broadcast_to(shared[:, :, None], shape)
      key = jnp.concatenate([key, shared], axis=3)
    return query, key, value

  def _low_rank(self, inputs):
    """Computes the features from which low-rank queries are projected."""
    return self.query_down_norm(self.query_down(inputs))

  def _latents(self, sources):
    """Computes the sources of the projections, and the shared key or None."""
    config, sources, shared = self.config, dict(sources), None
    if config.query_rank is not None and "query" in sources:
      sources["query"] = self._low_rank(sources["query"])
    has_value = "value" in self.projections
    if config.latent_rank is not None and "key" in sources and has_value:
      latent = self.latent_down(sources["key"])
      latent, shared = jnp.split(latent, [config.latent_rank], axis=2)
      sources |= dict.fromkeys(("key", "value"), self.latent_down_norm(latent))
    return sources, shared

  def prepare(
    self,
    query: Float[Array, "B T N H"] | None,
    key: Float[Array, "B S K H"] | None,
    positions: Positions | None,
  ) -> tuple[Any, Any]:
    """Normalizes and rotates queries and keys, and repeats heads that are shared.

    Args:
      query: `[B, T, N, H]`, as projected; None is returned as None.
      key: `[B, S, K, H]`, likewise.
      positions: `[B, T]` or `[1, T]`, for rotary.
    """
    if query is not None:
      query = self._normalize("query", query)
      if self.rotary:
        query = self._rotate_last(query, positions)
      query = self._with_temperature(query, positions)
      query = self._repeat_heads(query)
    if key is not None:
      key = self._normalize("key", key)
      if self.rotary:
        key = self._rotate_last(key, positions)
      key = self._repeat_heads(key)
    return query, key

  def _normalize(self, name, x):
    kind = self.config.query_key_norm
    if kind == "none":
      return x
    if kind == "l2":
      return unit_length(x).astype(x.dtype)
    joint = x.reshape(*x.shape[:2], -1) if kind == "rms_joint" else x
    return getattr(self, f"{name}_norm")(joint).reshape(x.shape)

  def _rotate(self, x, positions, fraction=None):
    config, scaling = self.config, self.config.rotary_scaling
    return rotate(
      x,
      positions,
      theta=config.rotary_theta,
      fraction=config.rotary_fraction if fraction is None else fraction,
      scaling=None if scaling is None else scaling.scaling,
    )

  def _rotate_last(self, x, positions):
    if {"own_keys", "shared_qk"} <= self.attention.supports:
      return x  # Without keys, there are no relative positions.
    width = self._shared_key_width
    if width is None:
      return self._rotate(x, positions)
    # Only the features that are multiplied by the shared key are rotated.
    rest, shared = jnp.split(x, [x.shape[-1] - width], axis=-1)
    return jnp.concatenate([rest, self._rotate(shared, positions)], axis=-1)

  def _with_temperature(self, query, positions):
    """Multiplies queries by the factor of their positions."""
    config = self.config
    if config.query_temperature == "none":
      return query
    if config.query_temperature == "log":
      factor = (
        jnp.log(positions + 1.0)[..., None] * self.temperature_scale[None, None]
      )
    else:
      length = cast(int, config.temperature_length)
      steps = jnp.asarray(positions) // length
      factor = 1.0 + config.temperature_rate * jnp.log1p(steps)[..., None]
    return query * factor[..., None].astype(query.dtype)

  def _repeat_heads(self, x):
    """Repeats queries or keys for all heads that share them."""
    shared, supports = self.config.num_qk_heads, self.attention.supports
    if shared is None or supports & {"own_keys", "value_heads"}:
      return x
    return jnp.repeat(x, self.dims.num_heads // shared, axis=2)

  @property
  def _shared_key_width(self) -> int | None:
    """P, the width of the key that all heads share; None without such a key."""
    if "own_keys" not in self.attention.supports:
      return self.config.shared_key_dim
    gates = cast(Callable[..., Any], self.attention.gates)
    widths = [self.dims.features]
    if self.attention.reads_query_inputs:
      widths.append(cast(int, self.config.query_rank))
    inputs = (jax.ShapeDtypeStruct((1, 1, x), jnp.float32) for x in widths)
    shapes = jax.eval_shape(gates, self.mechanism, *inputs)
    width = shapes["shared_key"].shape[-1] if "shared_key" in shapes else 0
    self._check_pairs(width)
    return width

  def _check_pairs(self, width: int) -> None:
    """Raises ValueError if a shared key of this width cannot be rotated."""
    if width < 2 or width % 2:
      raise ValueError(
        "position: rotary rotates pairs of the key that all heads share; expected "
        f"an even width of at least 2, got {width}"
      )

  def output(
    self,
    out: Float[Array, "B T N V"],
    inputs: Float[Array, "B T F"],
    value: Any = None,
  ) -> Float[Array, "B T F"]:
    """Normalizes, gates and projects the results of all heads.

    Args:
      out: `[B, T, N, V]`, the result of the mechanism.
      inputs: `[B, T, F]`, from which the output gate is computed.
      value: `[B, T, K, V]`, for exclusive self-attention.
    """
    kind, gate = self.config.output_norm, self.config.output_gate
    if self.config.exclusive:
      out = orthogonal_part(out, value)
    if kind in ("rms", "group", "group_scale"):
      out = self.out_norm(out)
    if kind in ("rms_joint_first", "rms_grouped_first"):
      out = self._normalize_output(out)
    if gate != "none":
      if self.config.output_gate_rank is not None:
        inputs = self.gate_down(inputs)
      if gate == "sigmoid_first":
        inputs, gate = jax.nn.sigmoid(inputs), "identity"
      # JAX approximates its GELU by tanh.
      function = getattr(
        jax.nn, gate.removesuffix("_head").removesuffix("_tanh")
      )
      gates, factor = self.gate(inputs), self.config.projection_factors[3]
      gates = function(factor * gates)
      out = out * gates.reshape(*out.shape[:3], -1)
    if kind in ("rms_joint", "rms_grouped"):
      out = self._normalize_output(out)
    out = out.reshape(*out.shape[:2], -1)
    if self.config.out_groups is not None:
      groups = out.reshape(*out.shape[:2], self.config.out_groups, -1)
      kernel = self.out_down.astype(out.dtype)
      out = jnp.einsum("btgd,gdr->btgr", groups, kernel)
      out = out.reshape(*out.shape[:2], -1)
    return self.out(out)

  def _normalize_output(self, out: Float[Array, "B T N V"]) -> Array:
    """Normalizes the results of all heads, or of groups of heads, together."""
    groups = ()
    if self.config.output_norm.startswith("rms_grouped"):
      groups = (self.config.num_qk_heads or self.dims.num_heads,)
    grouped = out.reshape(*out.shape[:2], *groups, -1)
    return self.out_norm(grouped).reshape(out.shape)


def projection_shapes(
  attention: Attention, config: SlotConfig, dims: Dims
) -> dict[str, tuple[int, int]]:
  """Returns the number of heads and their width for each projection."""
  shared = config.num_qk_heads
  query = shared or dims.num_heads, dims.head_dim
  if "own_keys" in attention.supports:
    return {"query": query}
  value = dims.num_kv_heads, dims.values
  if "shared_qk" in attention.supports:
    return {"query": query, "value": value}
  key_dim = dims.head_dim - (config.shared_key_dim or 0)
  key = shared or dims.num_kv_heads, key_dim
  return {"query": query, "key": key, "value": value}


def orthogonal_part(
  out: Float[Array, "B T N V"], value: Float[Array, "B T K V"]
) -> Float[Array, "B T N V"]:
  """Returns the component of each result orthogonal to its position's value."""
  value = jnp.repeat(value, out.shape[2] // value.shape[2], axis=2)
  out32, direction = out.astype(jnp.float32), unit_length(value)
  length = jnp.sum(out32 * direction, axis=-1, keepdims=True)
  return (out32 - length * direction).astype(out.dtype)


def kernel_init(scale: float = 1.0) -> nn.initializers.Initializer:
  """Truncated normal initializer with standard deviation `scale` / √fan_in."""
  return nn.initializers.variance_scaling(
    scale**2, "fan_in", "truncated_normal"
  )
