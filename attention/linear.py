"""Linear attention with any feature map (Katharopoulos et al., 2020)."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import (
  arguments,
  linear_blocks,
  linear_causal,
  linear_decode,
  plug,
)

FeatureMap = Callable[[Array], Array]
"""Takes `[..., H]` to `[..., M]`, row by row, nothing below 0."""


def elu_plus_one(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """elu(x) + 1: x + 1 above 0, e^x below; the paper's feature map.

  Not `jax.nn.elu(x) + 1`, which has lost half its digits at x = −8.
  """
  return jnp.where(x > 0.0, x + 1.0, jnp.exp(jnp.where(x > 0.0, 0.0, x)))


def relu(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """max(x, 0); a query whose features are all 0 sees nothing."""
  # Not `jax.nn.relu`: XLA's maximum may turn nan into 0 and so hide it.
  return jnp.where(x < 0.0, 0.0, x)


FEATURE_MAPS: Mapping[str, FeatureMap] = MappingProxyType(
  dict(elu=elu_plus_one, relu=relu, softplus=jax.nn.softplus)
)
"""The names that `linear` takes in a config."""


def linear_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  feature_map: FeatureMap = elu_plus_one,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
) -> Float[Array, "B T N V"]:
  """Attention whose kernel is a product of features, linear in length.

    out_t = φ(q_t)ᵀ Σ_s φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_s φ(k_s)

  over all keys, or those s ≤ t. The sums are one M×V matrix and one vector,
  whatever the length; the mathematics are in `linear_state` and
  `linear_causal`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    feature_map: φ, from `[..., H]` to `[..., M]` in float32, row by row and
      nothing below 0. Gradients flow to arrays that it closes over.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: query t sees keys s ≤ t.
    scale: None is φ(x), as in the paper; else φ(√scale · x), scale > 0.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; features and sums are float32. A
    query that sees no key, or whose normaliser is under 1e-30, gets zeros.

  Raises:
    ValueError: arguments do not fit, or the mask varies along queries.

  Cost: time (T·N + S·K)·M·(H+V), causal T·N·(M·(H+V) + C·(M+V)) with C = 64;
  memory beside the arguments M·(128+V) per head forward, as much with
  gradients, causal T/(4C)·M·V per head with gradients.

  Departs from its paper in that no epsilon is added to the normaliser, and in
  the masks and grouped heads, of which the paper does not speak.

  Paper: Transformers are RNNs, arXiv:2006.16236, equations 5 and 9.
  """
  arguments.check_qkv(query, key, value)
  keep = arguments.key_mask(
    mask,
    query,
    key,
    instead="linear attention never forms the T×S matrix; use dense attention "
    "for such a mask, or is_causal=True for a causal one",
  )
  head_dim = query.shape[-1]
  if scale is not None:
    scale = arguments.softmax_scale(scale, head_dim)
    if not isinstance(scale, jax.Array) and scale <= 0.0:
      raise ValueError(
        "scale: expected > 0 or None, for its root scales query and key, got "
        f"{scale}"
      )
    root, unscaled = jnp.sqrt(jnp.float32(scale)), feature_map

    def feature_map(x):
      return unscaled(x * root)

  features, constants = linear_blocks.feature_map(feature_map, head_dim)
  attend = linear_causal.causal if is_causal else linear_blocks.bidirectional
  operands = linear_blocks.Operands(query, key, value, constants)
  return attend(features, operands, keep)


def linear(feature_map: str | FeatureMap = "elu") -> plug.Attention:
  """The plug of `linear_attention`.

  Args:
    feature_map: a name in `FEATURE_MAPS`, or a function as `linear_attention`
      takes it.

  Raises:
    ValueError: an unknown name.
  """
  if isinstance(feature_map, str):
    if feature_map not in FEATURE_MAPS:
      raise ValueError(
        f"feature_map: expected one of {', '.join(FEATURE_MAPS)} or a "
        f"function, got {feature_map!r}"
      )
    feature_map = FEATURE_MAPS[feature_map]
  to_features = feature_map

  def apply(variables, query, key, value, **call):
    del variables
    call = arguments.accepted_options("linear", linear_attention, call)
    if "feature_map" in call:
      raise ValueError(
        "feature_map: it is chosen when the mechanism is made; pass it to "
        "linear(feature_map=…)"
      )
    return linear_attention(query, key, value, feature_map=to_features, **call)

  def init_cache(variables, batch, max_length, dims, dtype):
    # Sums over a whole sequence are kept in float32 whatever the activations.
    del variables, max_length, dtype
    size = linear_blocks.feature_map(to_features, dims.head_dim)[0].size
    return linear_decode.empty_cache(batch, dims, size, is_log=False)

  def decode(variables, cache, query, key, value):
    del variables
    return linear_decode.step(cache, query, key, value, to_features)

  return plug.Attention(
    init=plug.no_variables,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    supports=frozenset({"causal", "cross", "rowwise", "mask", "decode"}),
    approximates="dense",
    cost="linear",
  )
