"""Performer: linear attention through positive random features (FAVOR+).

Choromanski et al., Rethinking attention with Performers, arXiv:2009.14794.

The softmax kernel is an expectation over Gaussian ω of a product of positive
features, so with x̃ = √scale · x and M drawn rows ω_m

  exp(scale · q·k) ≈ Σ_m φ_m(q) φ_m(k),  φ_m(x) = exp(ω_m·x̃ − |x̃|²/2) / √M

and attention becomes a product with one M×V state instead of a T×S matrix. This
module computes the features, as logarithms. The rest is the code of linear attention,
which also keeps sums of them in float32's range.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import arguments, plug
from attention.features import FeatureMap, attend, decoding

_RELU_EPSILON = 1e-3
"""Added to ReLU features to keep them positive, as in the paper's code."""

Kernel = Literal["softmax", "relu"]


@arguments.attention_function(
  num_features="draw the features, projection=orthogonal_features(key, "
  "num_features, head_dim), or make the mechanism, performer(num_features=…)",
)
def performer_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  projection: Float[Array, "M H"],
  kernel: Kernel = "softmax",
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  block_size: int | None = None,
) -> Float[Array, "B T N V"]:
  """Softmax attention approximated by M random features, linear in length.

  out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s); the sums are one M×V matrix
  and one vector at any length.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    projection: `[M, H]`, rows ω_m, as `orthogonal_features` draws them.
    kernel: 'softmax' for φ_m(x) = exp(ω_m·x̃ − |x̃|²/2)/√M, 'relu' for
      φ_m(x) = max(ω_m·x̃/√M, 0) + 0.001, with x̃ = √scale · x. 'relu' is
      another kernel and does not approximate softmax.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the approximated logits, > 0; None is 1/√H.
    block_size: R, the positions of a step, or, in the causal form, C, the
      positions of a chunk, which is raised to a power of two. It changes only the
      rounding of the result. None is the platform's choice.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; features and state are float32.
    A query that sees no key gets zeros.

  Raises:
    ValueError: arguments do not fit, or the mask varies along queries.

  Cost: time and memory as `linear_attention`, with its R and C; causal also
  2·T·N·M·log₂ C exponentials. The error against softmax falls as 1/√M and grows with
  exp(|q||k|).

  Departs from the paper's code in having no epsilon in the softmax kernel, and
  a running log-scale instead of a maximum over all keys.

  Paper: arXiv:2009.14794, sections 2.2–2.4.
  """
  arrays = _prepared(query, key, value, projection, kernel, mask, scale)
  return attend(*arrays, is_causal=is_causal, block_size=block_size)


def _prepared(query, key, value, projection, kernel, mask, scale):
  """What `attend` takes by position, checked."""
  arguments.check_qkv(query, key, value)
  head_dim = query.shape[-1]
  if projection.ndim != 2 or projection.shape[1] != head_dim:
    raise ValueError(
      f"projection: expected [M, {head_dim}] to go with query {query.shape}, "
      f"got {projection.shape}"
    )
  if kernel not in ("softmax", "relu"):
    raise ValueError(f"kernel: expected 'softmax' or 'relu', got {kernel!r}")
  scale = arguments.softmax_scale(scale, head_dim)
  if not isinstance(scale, jax.Array) and scale <= 0.0:
    raise ValueError(
      f"scale: expected > 0, for its root scales query and key, got {scale}"
    )
  keep = arguments.key_mask(
    mask,
    query,
    key,
    instead="random features never form the T×S matrix; use dense attention "
    "for such a mask, or is_causal=True for a causal one",
  )
  phi, params = _feature_map(projection, kernel, scale)
  return phi, params, query, key, value, keep


def orthogonal_features(
  key: Array, num_features: int, head_dim: int
) -> Float[Array, "M H"]:
  """Draws M random features whose directions are orthogonal in blocks of H.

  The rows of each block of H are orthogonal, uniformly rotated, and as long as
  independent Gaussian rows. So each row by itself is N(0, 1), and the estimate
  stays unbiased while its variance falls (paper, section 2.4 and appendix B.2).

  Args:
    key: a JAX random key.
    num_features: M ≥ 1.
    head_dim: H ≥ 1.

  Returns:
    `[M, H]` float32.

  Raises:
    ValueError: a size is below 1.
  """
  arguments.check_at_least("num_features", num_features, 1)
  arguments.check_at_least("head_dim", head_dim, 1)
  directions_key, lengths_key = jax.random.split(key)
  num_blocks = -(-num_features // head_dim)
  blocks = jax.random.orthogonal(
    directions_key, head_dim, shape=(num_blocks,)
  ).reshape(num_blocks * head_dim, head_dim)[:num_features]
  gaussian = jax.random.normal(lengths_key, (num_features, head_dim))
  return blocks * jnp.linalg.norm(gaussian, axis=-1, keepdims=True)


def _feature_map(
  projection: Float[Array, "M H"],
  kernel: Kernel,
  scale: float | Float[Array, ""] | None,
) -> tuple[FeatureMap, tuple[Array, ...]]:
  """The feature map of a kernel, and its arrays: ω and √scale."""
  scale = arguments.softmax_scale(scale, projection.shape[1])
  params = projection.astype(jnp.float32), jnp.sqrt(jnp.float32(scale))
  is_log = kernel == "softmax"
  function = _log_softmax_features if is_log else _relu_features
  return FeatureMap(function, len(projection), is_log), params


def _log_softmax_features(
  x: Float[Array, "*A H"], projection: Float[Array, "M H"], root: Array
) -> Float[Array, "*A M"]:
  """Log φ without the 1/√M that numerator and normaliser have in common."""
  x = x * root
  return _projected(x, projection) - 0.5 * jnp.sum(x * x, -1, keepdims=True)


def _relu_features(
  x: Float[Array, "*A H"], projection: Float[Array, "M H"], root: Array
) -> Float[Array, "*A M"]:
  """φ of the 'relu' kernel."""
  projected = _projected(x * root, projection)
  projected /= jnp.sqrt(jnp.float32(projection.shape[0]))
  # Not `jax.nn.relu`, because XLA's maximum may turn nan into 0 and hide it.
  return jnp.where(projected < 0.0, 0.0, projected) + _RELU_EPSILON


def _projected(x, projection):
  return jnp.einsum("...H,MH->...M", x, projection)


def performer(
  num_features: int = 256, kernel: Kernel = "softmax"
) -> plug.Attention:
  """The plug of `performer_attention`.

  Args:
    num_features: M.
    kernel: 'softmax' or 'relu'.

  Returns:
    An `Attention` whose projection is in `constants`, drawn by `init`. It
    decodes with one state of K·M·(H+2) numbers for each example, or K·M·(H+1)
    for 'relu'.

  Raises:
    ValueError: `num_features` < 1 or an unknown kernel; by `init`, features
      that take more than `arguments.MOST_BYTES`.
  """
  arguments.check_at_least("num_features", num_features, 1)
  if kernel not in ("softmax", "relu"):
    raise ValueError(f"kernel: expected 'softmax' or 'relu', got {kernel!r}")

  def init(key, dims):
    numbers = num_features * dims.head_dim
    arguments.check_memory("num_features", num_features, numbers)
    projection = orthogonal_features(key, num_features, dims.head_dim)
    return {"constants": {"projection": projection}}

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "performer", performer_attention, call, own=("projection", "kernel")
    )
    return performer_attention(
      query,
      key,
      value,
      projection=variables["constants"]["projection"],
      kernel=kernel,
      **call,
    )

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
    projection = variables["constants"]["projection"]
    arrays = _prepared(query, key, value, projection, kernel, mask, scale)
    return attend(*arrays, is_causal=is_causal, axis_name=axis_name)

  def feature_map(variables, scale, head_dim):
    del head_dim
    return _feature_map(variables["constants"]["projection"], kernel, scale)

  init_cache, decode, prefill = decoding(feature_map)
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
    sizes=plug.Sizes(
      short={"num_features": 128}, timed=lambda length: {"num_features": 256}
    ),
  )
