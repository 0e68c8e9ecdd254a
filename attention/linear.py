"""Linear attention with any feature map (Katharopoulos et al., 2020).

This file computes the features; `attention.recurrent.features` sums them over the keys.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
import numpy as np

from attention import checks
from attention.decorators import (
  attention_factory,
  attention_function,
  make_apply,
)
from attention.mechanism import Attention, Dims, Hyperparameters, Variables
from attention.platform.layout import zero_masked
from attention.recurrent.features import (
  FeatureMap,
  attend,
  empty_state,
  query_state,
  root_scale,
  update_state,
  visible_keys,
)

Function = Callable[[Array], Array]
"""Maps `[..., H]` to `[..., M]`, row by row, with nonnegative products of rows."""


def elu_plus_one(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """elu(x) + 1: x + 1 above 0, e^x below; the paper's feature map.

  Unlike `jax.nn.elu(x) + 1`, it loses no precision for x far below 0.
  """
  return jnp.where(x > 0.0, x + 1.0, jnp.exp(jnp.where(x > 0.0, 0.0, x)))


def relu(x: Float[Array, "*A"]) -> Float[Array, "*A"]:
  """max(x, 0); a query whose features are all 0 sees no key."""
  # Not `jax.nn.relu`, because XLA's maximum may turn NaN into 0.
  return jnp.where(x < 0.0, 0.0, x)


def hedgehog_features(x: Float[Array, "*A H"]) -> Float[Array, "*A M"]:
  """[softmax(x), softmax(−x)], where x is already multiplied by W; M = 2H.

  Paper: The hedgehog & the porcupine, arXiv:2402.04347.
  """
  return jnp.concatenate([jax.nn.softmax(x), jax.nn.softmax(-x)], axis=-1)


def taylor_features(x: Float[Array, "*A H"]) -> Float[Array, "*A M"]:
  """[1, y, y ⊗ y / √2] with y = x / H^¼; M = 1 + H + H·(H+1)/2.

  With s = q·k/√H, φ(q)·φ(k) = 1 + s + s²/2, the second-order Taylor polynomial of e^s,
  which is at least 1/2. The equal products y_i y_j and y_j y_i are one feature.

  Paper: Simple linear attention language models balance the recall-throughput tradeoff
  (Based), arXiv:2402.18668, section 3.1.
  """
  head_dim = x.shape[-1]
  y = x * head_dim**-0.25
  first, second = np.triu_indices(head_dim)
  factor = np.where(first == second, 0.5**0.5, 1.0).astype(np.float32)
  products = y[..., first] * y[..., second]
  products *= jnp.broadcast_to(factor, products.shape)
  return jnp.concatenate([jnp.ones_like(y[..., :1]), y, products], axis=-1)


FEATURE_MAPS: Mapping[str, Function] = MappingProxyType(
  {
    "elu": elu_plus_one,
    "relu": relu,
    "softplus": jax.nn.softplus,
    "hedgehog": hedgehog_features,
    "taylor": taylor_features,
  }
)
"""The names that `linear` accepts in a config."""


@attention_function
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
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """Replaces the softmax kernel with a product of features; linear in length.

    out = linear_attention(q, k, v, is_causal=True)

    out_t = φ(q_t)ᵀ Σ_s φ(k_s) v_sᵀ / φ(q_t)ᵀ Σ_s φ(k_s)

  with sums over all keys, or over s ≤ t if causal. The sums are one M×V matrix and one
  vector at any length.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    feature_map: φ, from `[..., H]` to `[..., M]` in float32, row by row, such that
      φ(q)·φ(k) ≥ 0. Gradients flow to arrays that it closes over. `hedgehog_features`
      expects queries and keys that are already projected.
    mask: key mask `[B, 1, 1, S]`.
    scale: None means φ(x), as in the paper; otherwise φ(√scale · x), scale > 0.
    block_size: R, the number of positions of a step, or, in the causal form, C, the
      number of positions of a chunk, rounded up to a power of two. It affects only
      rounding. None means the platform's choice.
    axis_name: mesh axis inside `jax.shard_map`. Devices exchange only states.
    is_causal: query t sees only keys s ≤ t.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; features and sums are float32. A query that
    sees no key, or whose normaliser is under 1e-30, gets zeros.

  Raises:
    ValueError: the mask varies along queries.

  Cost: time (T·N + S·K)·M·(H+V), causal T·N·(M·(H+V) + C·(M+V)); memory M·(R+V) per
  head, with gradients also one state of M·V numbers per head for each R positions, in
  the causal form for each C. C is `scan.CHUNK` and R is `features.BLOCK`; on a GPU
  or TPU a step has as many of them as the budget of `attention.platform.backend` allows.

  Differs from the paper in masks, grouped heads, and a normaliser without epsilon.
  Papers: Transformers are RNNs, arXiv:2006.16236, equations 5 and 9; Hedgehog,
  arXiv:2402.04347; Based, arXiv:2402.18668.
  """
  phi = _feature_map(scale, query.shape[-1], feature_map=feature_map)
  return attend(
    phi,
    query,
    key,
    value,
    mask,
    is_causal=is_causal,
    block_size=block_size,
    axis_name=axis_name,
  )


def _feature_map(scale, head_dim, *, feature_map) -> FeatureMap:
  """φ(√scale · x), with gradients to the arrays that φ closes over.

  Raises:
    ValueError: the function does not map [..., H] to [..., M], or scale ≤ 0.
  """
  _check_feature_map(feature_map)
  row = jax.ShapeDtypeStruct((head_dim,), jnp.float32)
  shape = jax.eval_shape(feature_map, row).shape
  if len(shape) != 1:
    raise ValueError(
      "feature_map: expected a function of [..., H] to [..., M], got "
      f"{shape} for [{head_dim}]; only the last axis may change"
    )
  function, params = feature_map, []
  if not any(feature_map is named for named in FEATURE_MAPS.values()):
    row_map, params = jax.closure_convert(feature_map, row)
    excluded = frozenset(range(1, 1 + len(params)))
    function = jnp.vectorize(row_map, excluded=excluded, signature="(h)->(m)")
  if scale is None:
    return FeatureMap(function, shape[0], params=params)

  def scaled(x, root_of_scale, *params):
    return function(x * root_of_scale, *params)

  params = [root_scale(scale, head_dim), *params]
  return FeatureMap(scaled, shape[0], params=params)


def _check_feature_map(feature_map: Any) -> None:
  if not callable(feature_map):
    raise ValueError(
      "feature_map: expected a function or, in `linear`, one of "
      f"{', '.join(FEATURE_MAPS)}, got {feature_map!r}"
    )


def project_heads(
  kernel: Float[Array, "N H H"],
  x: Float[Array, "B T N H"],
  keep: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T N H"]:
  """Multiplies each head of `x` by its matrix W (input features first), in float32.

  Rows that `keep` excludes are zero, also in the gradient of W.
  """
  x = zero_masked(x, keep)
  x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
  return jnp.einsum("BTNH,NHI->BTNI", x, kernel)


def identity_kernels(dims: Dims) -> dict[str, Array]:
  """The initial W of Hedgehog, for queries and for keys."""
  eye = jnp.eye(dims.head_dim)
  return {
    "query_kernel": jnp.tile(eye, (dims.num_heads, 1, 1)),
    "key_kernel": jnp.tile(eye, (dims.num_kv_heads, 1, 1)),
  }


def feature_mechanism(
  name: str,
  function: Callable[..., Array],
  feature_map: Callable[..., FeatureMap],
  own: Callable[[Variables], dict[str, Any]],
  *,
  init: Callable[[Array, Dims], Variables],
  project: Callable[..., tuple[Array, Array]] | None = None,
  sizes: Hyperparameters | None = None,
) -> Attention:
  """Builds a mechanism of linear attention, whose cache is a state.

  Args:
    name: the mechanism's name.
    function: its attention function.
    feature_map: `(scale, head_dim, **own(variables)) -> FeatureMap`.
    own: `variables -> options`, the options of `function` that the mechanism sets.
    init: the mechanism's `init`.
    project: `(variables, query, key, *, keep) -> (query, key)`, applied before the
      features; `keep [B, S]` selects the unmasked keys, None means all.
    sizes: the mechanism's `sizes`.
  """
  attend_all = make_apply(name, function, own)

  def project_qk(variables, *qk, keep):
    return qk if project is None else project(variables, *qk, keep=keep)

  def apply(variables, query, key, value, **call):
    if project is None:
      return attend_all(variables, query, key, value, **call)
    checks.check_qkv(query, key, value)
    keep = visible_keys(call.get("mask"), query, key)
    qk = project(variables, query, key, keep=keep)
    return attend_all(variables, *qk, value, **call).astype(query.dtype)

  def map_features(variables, x, scale):
    return feature_map(scale, x.shape[-1], **own(variables))

  def init_cache(variables, batch, max_length, dims, dtype):
    del max_length, dtype
    phi = feature_map(None, dims.head_dim, **own(variables))
    return empty_state(batch, dims.num_kv_heads, phi, dims.values)

  def prefill(variables, state, query, key, value, lengths, *, scale=None):
    kv_heads, width = state.sums.shape[1:3]
    expected = *key.shape[:2], kv_heads, width - 1
    if value.shape != expected:
      raise ValueError(
        f"value: expected {list(expected)}, as the cache has, got shape {value.shape}"
      )
    keep = jnp.arange(key.shape[1])[None, :] < lengths[:, None]
    _, key = project_qk(variables, query, key, keep=keep)
    phi = map_features(variables, key, scale)
    return update_state(phi, state, (key, value, keep))

  def decode(variables, state, query, key, value, *, scale=None):
    lengths = jnp.ones(key.shape[0], jnp.int32)
    state = prefill(variables, state, query, key, value, lengths, scale=scale)
    queries, _ = project_qk(variables, query, key, keep=None)
    out = query_state(map_features(variables, query, scale), state, queries)
    return out.astype(query.dtype), state

  return Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=frozenset(
      {"causal", "cross", "rowwise", "mask", "decode", "sequence"}
    ),
    approximates="dense",
    cost="linear",
    sizes=sizes or Hyperparameters(),
  )


@attention_factory
def linear(feature_map: str | Function = "elu") -> Attention:
  """The mechanism of `linear_attention`.

  Args:
    feature_map: a name in `FEATURE_MAPS`, or a function as in `linear_attention`.
      'hedgehog' is φ(x) = [softmax(W x), softmax(−W x)] with a trained W for each query
      head and each key head, in `params` as `query_kernel [N, H, H]` and
      `key_kernel [K, H, H]`, initially the identity (Hedgehog, arXiv:2402.04347).
      'taylor' is `taylor_features`, for narrow queries and keys: Based has 16 channels
      per head, and layers of `sliding_window` in between.

  Returns:
    An `Attention` that decodes with one state of K·M·(H+1) numbers per example. It has
    variables only for 'hedgehog'.

  Raises:
    ValueError: `feature_map` is neither a known name nor a function.
  """
  is_trained = feature_map == "hedgehog"
  if isinstance(feature_map, str):
    feature_map = FEATURE_MAPS.get(feature_map, feature_map)
  _check_feature_map(feature_map)

  def init(key, dims):
    del key
    return {"params": identity_kernels(dims)} if is_trained else {}

  def project(variables, query, key, *, keep):
    params = variables["params"]
    query = project_heads(params["query_kernel"], query)
    return query, project_heads(params["key_kernel"], key, keep)

  return feature_mechanism(
    "linear",
    linear_attention,
    _feature_map,
    own=lambda variables: {"feature_map": feature_map},
    init=init,
    project=project if is_trained else None,
  )
