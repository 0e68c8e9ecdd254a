"""Multiplicative attention (Luong et al., 2015), with the dot and general scores.

The kernel is multiplied into the queries; the rest is `flash_attention`.
"""

from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.decorators import attention_factory, attention_function
from attention.dense import decode as decode_dense
from attention.dense import dense
from attention.flash import flash_attention
from attention.mechanism import Attention, Dims, Variables
from attention.softmax import own_logits
from attention.softmax.rows import Output
from attention.softmax.visible import EVERY_PAIR, Visible, VisibleOptions


@attention_function
def multiplicative_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  kernel: Float[Array, "N H H"] | None = None,
  scale: float | Float[Array, ""] | None = None,
  bias: Float[Array, "..."] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  relative_queries: Float[Array, "... P H"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
  axis_name: str | None = None,
  visible: Visible = EVERY_PAIR,
  return_lse: bool = False,
  **pairs: Unpack[VisibleOptions],
) -> Output:
  """Scores each pair through a trained matrix: softmax(Q W Kᵀ) V.

    out = multiplicative_attention(q, k, v, kernel=w)

    dot      score(t, s) = q_t · k_s                 kernel None
    general  score(t, s) = q_t · W_n k_s             kernel W

  As in the paper, the scores are not divided by √H, which Vaswani et al. introduced in
  2017.

  Args:
    query: `[B, T, N, H]`, the decoder's states h_t.
    key: `[B, S, K, H]`, the encoder's states h̄_s; N is a multiple of K.
    value: `[B, S, K, V]`; the paper's values are the states h̄_s.
    kernel: W_a `[N, H, H]`, one matrix per query head, with the query's features
      first; None means the identity.
    scale: factor of the scores; None means 1.
    block_size: (C, D), the queries and keys of a block, or one int for both.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees only keys s ≤ t.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    bias: added to the scaled logits, broadcastable to `[B, N, T, S]`.
    relative_bias: `[N, 2L+1]`, added to the logits by clipped distance.
    relative_keys: `[2L+1, H]` or `[N, 2L+1, H]`, keys by clipped distance.
    relative_queries: `[2L+1, H]` or `[N, 2L+1, H]`, queries by clipped distance.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.
    visible: the visible pairs, in addition to the other masking options.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    As in `dense_attention`.

  Cost: that of `flash_attention`, and time T·N·H² for the kernel. Nothing is
  T×S.

  Differs from the paper in several heads, and in values that are not the keys. The
  paper's concat score is close to `additive_attention`. Its monotonic local attention
  is `sliding_window_attention`. Its predictive local attention, with windows at learned
  positions, is not implemented.

  Paper: Effective approaches to attention-based neural machine translation,
  section 3.1, arXiv:1508.04025.
  """
  out: Any = flash_attention(
    _transform(kernel, query),
    key,
    value,
    scale=1.0 if scale is None else scale,
    bias=bias,
    relative_bias=relative_bias,
    relative_keys=relative_keys,
    relative_queries=relative_queries,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    block_size=block_size,
    axis_name=axis_name,
    visible=visible,
    return_lse=return_lse,
  )
  if return_lse:
    return out[0].astype(query.dtype), out[1]
  return out.astype(query.dtype)


def _transform(
  kernel: Float[Array, "N H H"] | None, query: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
  """Q W in float32, because rounding it to bfloat16 would change scores by 1 %."""
  if kernel is None:
    return query
  return jnp.einsum(
    "BTNH,NHI->BTNI", query.astype(jnp.float32), kernel.astype(jnp.float32)
  )


@attention_factory
def multiplicative(general: bool = True) -> Attention:
  """The mechanism of `multiplicative_attention`.

  Args:
    general: whether to train a kernel `[N, H, H]`, the paper's 'general' score; False
      is its 'dot' score. The kernel is drawn from N(0, 1/H²), so that the initial
      scores of unit normal inputs have standard deviation 1.

  Returns:
    An `Attention` that decodes with the cache of dense attention.

  Raises:
    ValueError: `general` is neither True nor False.
  """

  def init(key: Array, dims: Dims) -> Variables:
    if not general:
      return {}
    shape = (dims.num_heads, dims.head_dim, dims.head_dim)
    kernel = jax.random.normal(key, shape) / dims.head_dim
    return {"params": {"kernel": kernel}}

  def get_kernel(variables: Variables) -> Float[Array, "N H H"] | None:
    return variables["params"]["kernel"] if general else None

  def apply(variables, query, key, value, **call) -> Any:
    call: dict[str, Any] = {"kernel": get_kernel(variables), **call}
    return multiplicative_attention(query, key, value, **call)

  def decode(variables, cache, query, key, value, *, scale=None, **tables):
    projected = _transform(get_kernel(variables), query)
    scale = 1.0 if scale is None else scale
    out, cache = decode_dense(
      cache, projected, key, value, scale=scale, **tables
    )
    return out.astype(query.dtype), cache

  exact = dense()
  return exact._replace(
    init=init,
    apply=apply,
    decode=decode,
    approximates=None,
    supports=exact.supports - own_logits.SUPPORTS,
  )
