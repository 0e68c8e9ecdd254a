"""F · A⁺ · (B V) and its derivative, from the loops of `nystrom_blocks`.

  F = softmax(scale · Q K̃ᵀ)   A = softmax(scale · Q̃ K̃ᵀ)   B = softmax(scale · Q̃ Kᵀ)
  W = B V                     Z ≈ A⁺                      U = Z W     out = F U

Everything of L×L is left to autodiff. The backward keeps the inputs, the means,
W and the log-sum-exp of the rows of B, and passes once over queries for F, once
over keys and values for B and for the keys' means, and once over queries again
for theirs, each gradient added where it stands: autodiff of the three loops
apart holds two copies of the gradients of query and key at once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import nystrom_blocks as blocks
from attention import nystrom_means
from attention.nystrom_means import Tokens
from attention.core.softmax import masked_softmax

_EXACT = jax.lax.Precision.HIGHEST


class _Between(NamedTuple):
  """What follows from the means alone."""

  queries: Float[Array, "B N L H"]
  keys: Float[Array, "B K L H"]
  inverse: Float[Array, "B N L L"]


def pseudo_inverse(
  matrix: Float[Array, "B N L L"], iterations: int
) -> Float[Array, "B N L L"]:
  """The pseudo-inverse of stochastic matrices, by the paper's iteration.

  A singular value σ ≪ 1 of A starts as σ/‖A‖₁ in Z and grows by 13/4 a step
  until it reaches 1/σ. So does the rounding error of float32 where σ is 0:
  beyond some ten steps it shows in matrices that are singular.

  Args:
    matrix: each row sums to 1, or is zeros.
    iterations: steps; each costs four products.

  Returns:
    Z, which tends to the pseudo-inverse with the third power of its distance.
  """

  def dot(a, b):
    return jnp.einsum("BNIJ,BNJK->BNIK", a, b, precision=_EXACT)

  eye = jnp.eye(matrix.shape[-1], dtype=matrix.dtype)[None, None]

  def step(z, _):
    az = dot(matrix, z)
    inner = 15.0 * eye - dot(az, 7.0 * eye - az)
    return 0.25 * dot(z, 13.0 * eye - dot(az, inner)), None

  # ‖A‖∞, the largest sum of a row, is 1.
  norm = jnp.max(jnp.sum(matrix, axis=-2), axis=-1)[..., None, None]
  first = jnp.swapaxes(matrix, -1, -2) / jnp.where(norm > 0.0, norm, 1.0)
  return jax.lax.scan(step, first, length=iterations)[0]


def _exists(tokens: Tokens) -> Bool[Array, "B L"] | None:
  """Landmarks that have a token; None where all must, being at most T."""
  return None if tokens.keep is None else tokens.counts > 0


def _between(
  queries: Float[Array, "B N L H"],
  keys: Float[Array, "B K L H"],
  scale: Float[Array, ""],
  exists: Bool[Array, "B L"] | None,
  iterations: int,
) -> _Between:
  """Scaled means and Z; a landmark without tokens has zeros in A and Z."""
  batch, num_heads, num_landmarks, _ = queries.shape
  keys_scaled = scale * keys
  logits = jnp.einsum(
    "BKQH,BKLH->BKQL",
    queries.reshape(batch, keys.shape[1], -1, keys.shape[3]),
    keys_scaled,
    precision=_EXACT,
  ).reshape(batch, num_heads, num_landmarks, num_landmarks)
  if exists is None:
    matrix = jax.nn.softmax(logits)
  else:
    matrix = masked_softmax(logits, exists[:, None, None, :])
    matrix = jnp.where(exists[:, None, :, None], matrix, 0.0)
  inverse = pseudo_inverse(matrix, iterations)
  return _Between(scale * queries, keys_scaled, inverse)


def _dot(spec: str, a: Array, b: Array) -> Float[Array, "B N L D"]:
  return jnp.einsum(spec, a, b, precision=_EXACT)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  iterations: int,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  scale: Float[Array, ""],
  tokens: Tokens,
) -> Float[Array, "B T N V"]:
  """Nyström attention of checked arguments.

  Args:
    iterations: steps of the pseudo-inverse.
    query: `[B, T, N, H]`.
    key: N is a multiple of K.
    value: `[B, T, K, V]`.
    scale: factor of the logits.
    tokens: which exist, and their landmarks.

  Returns:
    In the dtype of `query`.
  """
  return _attend_fwd(iterations, query, key, value, scale, tokens)[0]


def _attend_fwd(iterations, query, key, value, scale, tokens):
  exists = _exists(tokens)
  means = nystrom_means.means(query, tokens), nystrom_means.means(key, tokens)
  between = _between(*means, scale, exists, iterations)
  mixed, lse = blocks.few_queries(between.queries, key, value, tokens.keep)
  inner = _dot("BNLM,BNMV->BNLV", between.inverse, mixed)
  out = blocks.few_keys(query, between.keys, inner, exists)
  return out, (query, key, value, scale, tokens, means, mixed, lse)


def _attend_bwd(iterations, residuals, cotangent):
  query, key, value, scale, tokens, means, mixed, lse = residuals
  exists = _exists(tokens)
  between, pullback = jax.vjp(
    lambda queries, keys, scale: _between(
      queries, keys, scale, exists, iterations
    ),
    *means,
    scale,
  )
  inner = _dot("BNLM,BNMV->BNLV", between.inverse, mixed)
  d_query, d_keys, d_inner = blocks.few_keys_backward(
    query, between.keys, inner, exists, cotangent
  )
  d_mixed = _dot("BNLM,BNLV->BNMV", between.inverse, d_inner)
  d_inverse = _dot("BNLV,BNMV->BNLM", d_inner, mixed)
  # The pullback is linear: B's part for the queries' means comes afterwards, as
  # the loop that finds it also takes the gradient of the keys' means along.
  of_queries, of_keys, d_scale = pullback(
    _Between(jnp.zeros_like(between.queries), d_keys, d_inverse)
  )
  d_queries, d_key, d_value = blocks.few_queries_backward(
    between.queries, key, value, tokens, mixed, lse, d_mixed, of_keys
  )
  d_query = nystrom_means.add_means_backward(
    d_query, of_queries + scale * d_queries, tokens
  )
  d_scale = d_scale + jnp.sum(d_queries * means[0])
  return d_query, d_key, d_value, d_scale, None


attend.defvjp(_attend_fwd, _attend_bwd)
