"""Linear attention with any feature map (Katharopoulos et al., 2020).

This module checks arguments and makes the feature map. `kernel.attend` chooses
the loop: `bidirectional` over all keys, or `causal`.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, plug
from attention.linear import cache, hedgehog, kernel, parts
from attention.linear.features import FeatureMap, Operands

Function = Callable[[Array], Array]
"""Maps `[..., H]` to `[..., M]`, row by row, with no number below 0."""


def elu_plus_one(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """elu(x) + 1: x + 1 above 0, e^x below; the paper's feature map.

  It is not `jax.nn.elu(x) + 1`, which has lost half its digits at x = −8.
  """
  return jnp.where(x > 0.0, x + 1.0, jnp.exp(jnp.where(x > 0.0, 0.0, x)))


def relu(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """max(x, 0); a query whose features are all 0 sees nothing."""
  # Not `jax.nn.relu`, because XLA's maximum may turn nan into 0 and hide it.
  return jnp.where(x < 0.0, 0.0, x)


FEATURE_MAPS: Mapping[str, Function] = MappingProxyType(
  dict(
    elu=elu_plus_one,
    relu=relu,
    softplus=jax.nn.softplus,
    hedgehog=hedgehog.hedgehog_features,
  )
)
"""The names that `linear` takes in a config."""


@arguments.attention_function()
def linear_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  feature_map: Function = elu_plus_one,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Attention whose kernel is a product of features, linear in length.

    out_t = φ(q_t)ᵀ Σ_s φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_s φ(k_s)

  over all keys, or those s ≤ t. The sums are one M×V matrix and one vector at
  any length. The mathematics are in `state`, and for the causal form also in
  `chunk`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    feature_map: φ, from `[..., H]` to `[..., M]` in float32, row by row, with
      no number below 0. Gradients flow to arrays that it closes over.
      `hedgehog_features` is for queries and keys that are projected already.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: query t sees keys s ≤ t.
    scale: None is φ(x), as in the paper; otherwise φ(√scale · x), scale > 0.
    block_size: R, the positions of a step, or, in the causal form, C, the
      positions of a chunk. It changes only the rounding of the result. None is
      the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; features and sums are float32. A
    query that sees no key, or whose normaliser is under 1e-30, gets zeros.

  Raises:
    ValueError: arguments do not fit, or the mask varies along queries.

  Cost: time (T·N + S·K)·M·(H+V), causal T·N·(M·(H+V) + C·(M+V)). Memory in
  addition to the arguments and the result: M·(R+V) per head, with or without
  gradients. A causal call also takes T/R·M·V per head with gradients, and a
  copy of keys and values where S ≠ T. C is `causal.CHUNK`. R is `blocks.BLOCK`,
  in the causal form `causal.GROUP` chunks, and on a GPU or TPU as many times
  more as the budget of bytes of `core.platform` allows.

  Departs from its paper in adding no epsilon to the normaliser, and in masks
  and grouped heads, which the paper does not discuss.

  Paper: Transformers are RNNs, arXiv:2006.16236, equations 5 and 9. The trained
  features are those of Hedgehog, arXiv:2402.04347.
  """
  features, operands, keep = _prepared(
    query, key, value, feature_map, mask, scale
  )
  return kernel.attend(
    features, operands, keep, is_causal=is_causal, block_size=block_size
  )


def _prepared(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  feature_map: Function,
  mask: Bool[Array, "..."] | None,
  scale: float | Float[Array, ""] | None,
) -> tuple[FeatureMap, Operands, Bool[Array, "B S"] | None]:
  """The feature map, what has a derivative, and which keys count; checked."""
  arguments.check_qkv(query, key, value)
  keep = arguments.key_mask(
    mask,
    query,
    key,
    instead="linear attention never forms the T×S matrix; use dense attention "
    "for such a mask, or is_causal=True for a causal one",
  )
  head_dim = query.shape[-1]
  _check_feature_map(feature_map)
  features, parameters = _feature_map(feature_map, head_dim)
  features, parameters = _scaled(features, parameters, scale, head_dim)
  return features, Operands(query, key, value, parameters), keep


class _Scaled(NamedTuple):
  """A feature map that is applied to root · x."""

  function: Callable[..., Array]

  def __call__(self, x, root, *parameters):
    return self.function(x * root, *parameters)


def _scaled(
  features: FeatureMap,
  parameters: tuple[Array, ...],
  scale: float | Array | None,
  head_dim: int,
) -> tuple[FeatureMap, tuple[Array, ...]]:
  """The feature map of √scale · x; of x where `scale` is None."""
  if scale is None:
    return features, parameters
  scale = arguments.softmax_scale(scale, head_dim)
  if not isinstance(scale, jax.Array) and scale <= 0.0:
    raise ValueError(
      "scale: expected > 0 or None, for its root scales query and key, got "
      f"{scale}"
    )
  scaled = features._replace(function=_Scaled(features.function))
  return scaled, (jnp.sqrt(jnp.float32(scale)), *parameters)


def _check_feature_map(feature_map: Any) -> None:
  if not callable(feature_map):
    raise ValueError(
      f"feature_map: expected a function or, in `linear`, one of "
      f"{', '.join(FEATURE_MAPS)}, got {feature_map!r}"
    )


def _feature_map(
  function: Function, head_dim: int
) -> tuple[FeatureMap, tuple[Array, ...]]:
  """The feature map in the form that the loops take, and its arrays.

  The caller's function may close over arrays. They become arguments here, so
  that gradients reach them.

  Raises:
    ValueError: the function does not map [..., H] to [..., M].
  """
  vector = jax.ShapeDtypeStruct((head_dim,), jnp.float32)
  shape = jax.eval_shape(function, vector).shape
  if len(shape) != 1:
    raise ValueError(
      "feature_map: expected a function of [..., H] to [..., M], got "
      f"{shape} for [{head_dim}]; it must keep the axes before the last"
    )
  if any(function is named for named in FEATURE_MAPS.values()):
    return FeatureMap(function, False, shape[0]), ()
  converted, parameters = jax.closure_convert(function, vector)

  def of_rows(x, *parameters):
    def rows(x):
      return converted(x, *parameters)

    for _ in x.shape[:-1]:
      rows = jax.vmap(rows)
    return rows(x)

  return FeatureMap(of_rows, False, shape[0]), tuple(parameters)


def linear(feature_map: str | Function = "elu") -> plug.Attention:
  """The plug of `linear_attention`.

  Args:
    feature_map: a name in `FEATURE_MAPS`, or a function as `linear_attention`
      takes it. 'hedgehog' is φ(x) = [softmax(W x), softmax(−W x)] with a
      trained W for each query head and each key head, in `params` as
      `query_kernel [N, H, H]` and `key_kernel [K, H, H]`, which start as the
      identity (Hedgehog, arXiv:2402.04347).

  Returns:
    An `Attention` that decodes with one state of K·M·(H+1) numbers for each
    example. It has variables for 'hedgehog' only.

  Raises:
    ValueError: `feature_map` is an unknown name, or no function.
  """
  is_trained = feature_map == "hedgehog"
  if isinstance(feature_map, str):
    if feature_map not in FEATURE_MAPS:
      raise ValueError(
        f"feature_map: expected one of {', '.join(FEATURE_MAPS)} or a "
        f"function, got {feature_map!r}"
      )
    feature_map = FEATURE_MAPS[feature_map]
  _check_feature_map(feature_map)
  to_features = feature_map

  def init(key, dims):
    del key
    if is_trained:
      return {"params": hedgehog.identity_kernels(dims)}
    return {}

  def projected(variables, query, key):
    if not is_trained:
      return query, key
    params = variables["params"]
    return (
      hedgehog.through(params["query_kernel"], query),
      hedgehog.through(params["key_kernel"], key),
    )

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "linear", linear_attention, call, own=("feature_map",)
    )
    arguments.check_qkv(query, key, value)
    projections = projected(variables, query, key)
    out = linear_attention(*projections, value, feature_map=to_features, **call)
    return out.astype(query.dtype)

  def apply_sharded(
    variables,
    query,
    key,
    value,
    *,
    axis_name,
    mask=None,
    is_causal=False,
    scale=None,
  ):
    projections = projected(variables, query, key)
    prepared = _prepared(*projections, value, to_features, mask, scale)
    out = parts.attend(*prepared, is_causal=is_causal, axis_name=axis_name)
    return out.astype(query.dtype)

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables, max_length, dtype
    features, _ = _feature_map(to_features, dims.head_dim)
    return cache.init_cache(batch, dims, features.size, features.is_log)

  def mapped(scale, head_dim):
    return _scaled(*_feature_map(to_features, head_dim), scale, head_dim)

  def prefill(variables, state, query, key, value, lengths, *, scale=None):
    _, key = projected(variables, query, key)
    keep = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    return cache.prefill(*mapped(scale, key.shape[-1]), state, key, value, keep)

  def decode(variables, state, query, key, value, *, scale=None):
    features, parameters = mapped(scale, query.shape[-1])
    projections = projected(variables, query, key)
    out, state = cache.decode(features, parameters, state, *projections, value)
    return out.astype(query.dtype), state

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    apply_sharded=apply_sharded,
    supports=frozenset(
      {"causal", "cross", "rowwise", "mask", "decode", "sequence"}
    ),
    approximates="dense",
    cost="linear",
  )
