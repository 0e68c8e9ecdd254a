"""Performer: linear attention through positive random features (FAVOR+).

The softmax kernel is an expectation over Gaussian ω of a product of positive
features, so with x̃ = √scale · x and M drawn rows ω_m

  exp(scale · q·k) ≈ Σ_m φ_m(q) φ_m(k),  φ_m(x) = exp(ω_m·x̃ − |x̃|²/2) / √M

and attention becomes a product with one M×V state instead of a T×S matrix. This file
computes the features, or their logarithms for the softmax kernel;
`attention.recurrent.features` keeps their sums in the range of float32.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.linear import feature_mechanism
from attention.mechanism import Attention, Hyperparameters
from attention.recurrent.features import FeatureMap, attend, root_scale

_RELU_EPSILON = 1e-3
"""Added to ReLU features to keep them positive, as in the paper's code."""

Kernel = Literal["softmax", "relu"]


@attention_function
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
  axis_name: str | None = None,
) -> Float[Array, "B T N V"]:
  """Approximates softmax attention with M random features; linear in length.

    out = performer_attention(q, k, v, projection=w, is_causal=True)

  out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s). The sums are one M×V matrix and
  one vector at any length.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`.
    value: `[B, S, K, V]`.
    projection: `[M, H]` with rows ω_m, drawn by `orthogonal_features`.
    kernel: 'softmax' for φ_m(x) = exp(ω_m·x̃ − |x̃|²/2)/√M, 'relu' for
      φ_m(x) = max(ω_m·x̃/√M, 0) + 0.001, with x̃ = √scale · x. 'relu' is
      another kernel and does not approximate softmax.
    scale: factor of the approximated logits, > 0; None means 1/√H.
    mask: key mask `[B, 1, 1, S]`.
    is_causal: query t sees only keys s ≤ t.
    block_size: C, the number of positions of a chunk.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.

  Returns:
    `[B, T, N, V]` in the dtype of `query`. A query that sees no key outputs zeros.

  Raises:
    ValueError: the mask varies along queries.

  Cost: time and memory as in `linear_attention`, and 2·T·N·M·log₂ C exponentials if
  scores of a chunk leave the range of float32. The error against softmax falls as 1/√M and
  grows with exp(|q||k|).

  Unlike in the paper's code, the softmax kernel has no epsilon, and a running log-scale
  replaces the maximum over all keys. Paper: Rethinking attention with Performers,
  arXiv:2009.14794, sections 2.2–2.4.
  """
  phi = _feature_map(
    scale, query.shape[-1], projection=projection, kernel=kernel
  )
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


def orthogonal_features(
  key: Array, num_features: int, head_dim: int
) -> Float[Array, "M H"]:
  """Draws M random features; the directions in each block of H are orthogonal.

  The rows of a block have uniform random directions and the lengths of independent
  Gaussian rows. So each row has the distribution N(0, I), and the estimate is unbiased,
  with a lower variance (paper, section 2.4 and appendix B.2).

  Raises:
    ValueError: a size is below 1.
  """
  checks.check_at_least("num_features", num_features, 1)
  checks.check_at_least("head_dim", head_dim, 1)
  directions_key, lengths_key = jax.random.split(key)
  num_blocks = -(-num_features // head_dim)
  blocks = jax.random.orthogonal(directions_key, head_dim, (num_blocks,))
  directions = blocks.reshape(-1, head_dim)[:num_features]
  gaussian = jax.random.normal(lengths_key, directions.shape)
  return directions * jnp.linalg.norm(gaussian, axis=-1, keepdims=True)


def _feature_map(scale, head_dim, *, projection, kernel) -> FeatureMap:
  """The feature map of a kernel, with its arrays ω and √scale."""
  is_log = kernel == "softmax"
  function = _softmax_log_features if is_log else _relu_features
  params = projection.astype(jnp.float32), root_scale(scale, head_dim)
  return FeatureMap(function, len(projection), is_log, params)


def _softmax_log_features(x, projection, sqrt_scale):
  """Log φ without the factor 1/√M, which cancels in the quotient."""
  x = x * sqrt_scale
  products = jnp.einsum("...H,MH->...M", x, projection)
  return products - 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)


def _relu_features(x, projection, sqrt_scale):
  """φ of the 'relu' kernel."""
  products = jnp.einsum("...H,MH->...M", x * sqrt_scale, projection)
  products /= jnp.sqrt(jnp.float32(len(projection)))
  # Not `jax.nn.relu`, because XLA's maximum may turn NaN into 0.
  return jnp.where(products < 0.0, 0.0, products) + _RELU_EPSILON


@attention_factory
def performer(num_features: int = 256, kernel: Kernel = "softmax") -> Attention:
  """The mechanism of `performer_attention`.

  Args:
    num_features: M.
    kernel: 'softmax' or 'relu'.

  Returns:
    An `Attention` whose projection is drawn by `init` and stored in `constants`. It
    decodes with one state of K·M·(H+2) numbers per example, or K·M·(H+1) for 'relu'.

  Raises:
    ValueError: `num_features` < 1 or an unknown kernel.
  """

  def init(key, dims):
    projection = orthogonal_features(key, num_features, dims.head_dim)
    return {"constants": {"projection": projection}}

  return feature_mechanism(
    "performer",
    performer_attention,
    _feature_map,
    own=lambda variables: {**variables["constants"], "kernel": kernel},
    init=init,
    sizes=Hyperparameters(
      short={"num_features": 128}, timed=lambda length: {"num_features": 256}
    ),
  )
