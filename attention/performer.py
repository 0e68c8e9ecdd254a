"""Performer: linear attention through positive random features (FAVOR+).

Choromanski et al., Rethinking attention with Performers, arXiv:2009.14794.

The softmax kernel is an expectation over Gaussian ω of a product of positive
features, so with x̃ = √scale · x and M drawn rows ω_m

  exp(scale · q·k) ≈ Σ_m φ_m(q) φ_m(k),  φ_m(x) = exp(ω_m·x̃ − |x̃|²/2) / √M

and attention becomes a product with one M×V state instead of a T×S matrix. The
state, and how it stays exact and in range, is in `linear_state`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import (
  arguments,
  linear_blocks,
  linear_causal,
  linear_decode,
  linear_state,
  plug,
)

_RELU_EPSILON = 1e-3
"""Added to ReLU features, as in the paper's code: keeps them positive."""

Kernel = Literal["softmax", "relu"]


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
) -> Float[Array, "B T N V"]:
  """Softmax attention approximated by M random features, linear in length.

  out_t = Σ_s φ(q_t)·φ(k_s) v_s / Σ_s φ(q_t)·φ(k_s); see `linear_state`.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`.
    projection: `[M, H]`, rows ω_m, as `orthogonal_features` draws them.
    kernel: 'softmax' for φ_m(x) = exp(ω_m·x̃ − |x̃|²/2)/√M, 'relu' for
      φ_m(x) = max(ω_m·x̃/√M, 0) + 0.001 (a kernel of its own, no approximation
      of softmax), x̃ = √scale · x.
    mask: key mask `[B, 1, 1, S]`, True = attend.
    is_causal: query t sees keys s ≤ t.
    scale: of the approximated logits, > 0; None is 1/√H.

  Returns:
    `[B, T, N, V]` in the dtype of `query`; features and state are float32.
    A query that sees no key gets zeros.

  Raises:
    ValueError: arguments do not fit, or the mask varies along queries.

  Cost: time (T·N + S·K)·M·(H+V), causal T·N·(M·(H+V) + C·(M+V)) with C = 64;
  memory beside the arguments M·(128+V) per head forward, as much with
  gradients, causal T/(4C)·M·V per head with gradients. Error against softmax
  falls as 1/√M and grows with exp(|q||k|). Inputs so large (from about 8 times
  the unit normal on) that the scores of a causal chunk leave float32's range
  cost that chunk C·M·N exponentials a query: slower, but nothing is lost.

  Where it departs from the paper's code: no epsilon in the softmax kernel and a
  running log-scale instead of a maximum over all keys.

  Paper: arXiv:2009.14794, sections 2.2–2.4.
  """
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

  features, constants = linear_blocks.feature_map(
    _feature_map(projection, kernel, scale), head_dim, kernel == "softmax"
  )
  attend = linear_causal.causal if is_causal else linear_blocks.bidirectional
  operands = linear_blocks.Operands(query, key, value, constants)
  return attend(features, operands, keep)


def orthogonal_features(
  key: Array, num_features: int, head_dim: int
) -> Float[Array, "M H"]:
  """Draws M random features whose directions are orthogonal in blocks of H.

  Rows of each block of H are orthogonal, uniformly rotated, and as long as
  independent Gaussian rows would be, so each row alone is N(0, 1): the estimate
  stays unbiased and its variance falls (paper, section 2.4 and appendix B.2).

  Args:
    key: a JAX random key.
    num_features: M ≥ 1.
    head_dim: H ≥ 1.

  Returns:
    `[M, H]` float32.

  Raises:
    ValueError: a size is below 1.
  """
  if num_features < 1 or head_dim < 1:
    raise ValueError(
      "num_features, head_dim: expected at least 1, got "
      f"{num_features} and {head_dim}"
    )
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
  scale: float | Float[Array, ""],
) -> Callable[[Float[Array, "*A H"]], Float[Array, "*A M"]]:
  """φ of the 'relu' kernel, log φ of the other up to the factor 1/√M.

  That factor is common to numerator and normaliser, so it cancels.
  """

  def features(x):
    x = x.astype(jnp.float32) * jnp.sqrt(jnp.float32(scale))
    projected = jnp.einsum("...H,MH->...M", x, projection.astype(jnp.float32))
    if kernel == "relu":
      projected = projected / jnp.sqrt(jnp.float32(projection.shape[0]))
      # Not `jax.nn.relu`: XLA's maximum may turn nan into 0 and so hide it.
      return jnp.where(projected < 0.0, 0.0, projected) + _RELU_EPSILON
    return projected - 0.5 * jnp.sum(x * x, axis=-1, keepdims=True)

  return features


def init_performer_cache(
  variables: plug.Variables,
  batch: int,
  max_length: int,
  dims: plug.Dims,
  dtype: Any,
  kernel: Kernel = "softmax",
) -> linear_state.LinearState:
  """An empty state: B·K·M·(H+2) float32 numbers whatever `max_length` is."""
  # Sums over a whole sequence are kept in float32 whatever the activations are.
  del max_length, dtype
  num_features = variables["constants"]["projection"].shape[0]
  return linear_decode.empty_cache(
    batch, dims, num_features, is_log=kernel == "softmax"
  )


def performer(
  num_features: int = 256, kernel: Kernel = "softmax"
) -> plug.Attention:
  """The plug of `performer_attention`.

  Args:
    num_features: M.
    kernel: 'softmax' or 'relu'.

  Returns:
    An `Attention` whose features stand in `constants`, drawn by `init`.

  Raises:
    ValueError: `num_features` < 1 or an unknown kernel.
  """
  if num_features < 1:
    raise ValueError(f"num_features: expected at least 1, got {num_features}")
  if kernel not in ("softmax", "relu"):
    raise ValueError(f"kernel: expected 'softmax' or 'relu', got {kernel!r}")

  def init(key, dims):
    projection = orthogonal_features(key, num_features, dims.head_dim)
    return {"constants": {"projection": projection}}

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options("performer", performer_attention, call)
    return performer_attention(
      query,
      key,
      value,
      projection=variables["constants"]["projection"],
      kernel=kernel,
      **call,
    )

  def decode(variables, cache, query, key, value):
    projection = variables["constants"]["projection"]
    scale = arguments.softmax_scale(None, query.shape[-1])
    features = _feature_map(projection, kernel, scale)
    return linear_decode.step(cache, query, key, value, features)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=partial(init_performer_cache, kernel=kernel),
    decode=decode,
    supports=frozenset({"causal", "cross", "rowwise", "mask", "decode"}),
    approximates="dense",
    cost="linear",
    sizes=plug.Sizes(
      short={"num_features": 128}, timed=lambda length: {"num_features": 256}
    ),
  )
