"""Multiplicative attention (Luong et al., 2015): scores dot and general.

The kernel is multiplied into the queries; the rest is `flash_attention`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, own_logits, plug
from attention.dense import decode as decode_dense
from attention.dense import dense
from attention.flash import flash_attention
from attention.sharded import attention_in_parts


@arguments.attention_function(
  general="give the array, kernel=[N, H, H], for the general form; None is the "
  "dot",
)
def multiplicative_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  kernel: Float[Array, "N H H"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  bias: Float[Array, "..."] | None = None,
  relative_bias: Float[Array, "N D"] | None = None,
  relative_keys: Float[Array, "... E H"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
) -> Float[Array, "B T N V"]:
  """Scores are products with a trained matrix in between: softmax(Q W Kᵀ) V.

    dot      score(t, s) = q_t · k_s                 kernel None
    general  score(t, s) = q_t · W_n k_s             kernel W

  As in the paper, the scores are not divided by √H, which came with Vaswani et
  al., 2017.

  Args:
    query: `[B, T, N, H]`, the decoder's states h_t.
    key: `[B, S, K, H]`, the encoder's states h̄_s; N is a multiple of K.
    value: `[B, S, K, V]`; the paper averages the states themselves.
    kernel: W_a `[N, H, H]`, one matrix for each query head, with the features
      of the query first; None is the identity.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees keys s ≤ t.
    scale: factor of the scores; None is 1.
    query_segment_ids: `[B, T]`; a query sees keys of its own segment only.
    key_segment_ids: `[B, S]`.
    bias: added to the scores, broadcastable to `[B, N, T, S]`.
    relative_bias: `[N, 2L+1]`, added by clipped distance, see `attention.relative`.
    relative_keys: `[2L+1, H]` or, a table for each head, `[N, 2L+1, H]`, added
      to the keys by clipped distance.
    dropout_rate: share of attention weights set to zero.
    dropout_rng: key of the dropout, needed where `dropout_rate` > 0.
    block_size: as in `flash_attention`.

  Returns:
    `[B, T, N, V]` in the dtype of `query`.

  Raises:
    ValueError: arguments do not fit together.

  Cost: that of `flash_attention`, and time T·N·H² for the kernel. Nothing is
  T×S.

  Departs from its paper in having several heads, and values that differ from
  the keys. Of the paper's other scores, concat is close to
  `additive_attention`. Of its local forms, the monotonic one is
  `sliding_window_attention`, and the predictive one, a window around a learnt
  position, is not here.

  Paper: Effective approaches to attention-based neural machine translation,
  section 3.1, arXiv:1508.04025.
  """
  arguments.check_qkv(query, key, value)
  num_heads, head_dim = query.shape[2:]
  if kernel is not None:
    expected = (num_heads, head_dim, head_dim)
    if kernel.shape != expected:
      raise ValueError(
        f"kernel: expected [N, H, H] = {list(expected)}, got shape "
        f"{kernel.shape}"
      )
  turned = query if kernel is None else _through(kernel, query)
  out: Any = flash_attention(
    turned,
    key,
    value,
    mask=mask,
    is_causal=is_causal,
    scale=1.0 if scale is None else scale,
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    bias=bias,
    relative_bias=relative_bias,
    relative_keys=relative_keys,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    block_size=block_size,
  )
  return out.astype(query.dtype)


def _through(
  kernel: Float[Array, "N H H"], query: Float[Array, "B T N H"]
) -> Float[Array, "B T N H"]:
  """Q W in float32; rounded to bfloat16, it would change scores by 1 %."""
  return jnp.einsum(
    "BTNH,NHI->BTNI", query.astype(jnp.float32), kernel.astype(jnp.float32)
  )


def multiplicative(general: bool = True) -> plug.Attention:
  """The plug of `multiplicative_attention`.

  Args:
    general: True trains a kernel `[N, H, H]`, the paper's 'general'; False is
      its 'dot'. The kernel is drawn from N(0, 1/H²), so that the scores of unit
      normal inputs start with deviation 1.

  Returns:
    An `Attention` that decodes with the cache of dense attention.

  Raises:
    ValueError: `general` is neither True nor False.
  """
  arguments.check_flag("general", general)

  def init(key: Array, dims: plug.Dims) -> plug.Variables:
    if not general:
      return {}
    shape = (dims.num_heads, dims.head_dim, dims.head_dim)
    kernel = jax.random.normal(key, shape) / dims.head_dim
    return {"params": {"kernel": kernel}}

  def kernel_of(variables: plug.Variables) -> Float[Array, "N H H"] | None:
    return variables["params"]["kernel"] if general else None

  def apply(variables, query, key, value, **call):
    call = arguments.accepted_options(
      "multiplicative", multiplicative_attention, call
    )
    call.setdefault("kernel", kernel_of(variables))
    return multiplicative_attention(query, key, value, **call)

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    kernel = kernel_of(variables)
    scale = call.pop("scale", None)
    out = attention_in_parts(
      query if kernel is None else _through(kernel, query),
      key,
      value,
      axis_name=axis_name,
      scale=1.0 if scale is None else scale,
      **call,
    )
    return out.astype(query.dtype)

  def decode(variables, cache, query, key, value, *, scale=None, **tables: Any):
    kernel = kernel_of(variables)
    turned = query if kernel is None else _through(kernel, query)
    out, cache = decode_dense(
      cache,
      turned,
      key,
      value,
      scale=1.0 if scale is None else scale,
      **tables,
    )
    return out.astype(query.dtype), cache

  exact = dense()
  return exact._replace(
    init=init,
    apply=apply,
    apply_sharded=apply_sharded,
    decode=decode,
    approximates=None,
    supports=exact.supports - own_logits.SUPPORTS,
  )
