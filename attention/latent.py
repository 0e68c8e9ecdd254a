"""Latent attention: keys and values from low-rank latent vectors (DeepSeek-V2)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.dense import dense
from attention.flash import flash_attention
from attention.mechanism import Attention, accepted_options
from attention.platform import layout
from attention.recurrent.gates import check_gates, kernel
from attention.softmax import own_logits
from attention.softmax.visible import EVERY_PAIR, Visible

EPSILON = 1e-6
"""ε of the norms of latent vectors."""


@attention_function
def latent_attention(
  query: Float[Array, "B T N H"],
  latent: Float[Array, "B S R"],
  *,
  key_kernel: Float[Array, "R N C"],
  value_kernel: Float[Array, "R N V"],
  shared_key: Float[Array, "B S P"] | None = None,
  value: Float[Array, "B S K D"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = False,
  scale: float | Float[Array, ""] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
  block_size: int | tuple[int, int] | None = None,
  absorbed: bool = False,
  axis_name: str | None = None,
  visible: Visible | None = None,
  return_lse: bool = False,
) -> (
  Float[Array, "B T N U"]
  | tuple[Float[Array, "B T N U"], Float[Array, "B T N"]]
):
  """Exact attention with keys and values projected from a latent vector per position.

    out = latent_attention(q, c, key_kernel=w, value_kernel=u, is_causal=True)

    k[s, n] = [c_s · W_K[n]; r_s]        v[s, n] = c_s · W_V[n]
    out[t, n] = Σ_s softmax_s(scale · q[t, n] · k[s, n]) v[s, n]

  where c is `latent` and r is `shared_key`, one key for all heads, which has rotary
  positions. The expanded form computes these keys and values. The absorbed form
  multiplies the kernels into the queries and the output instead,

    q · k = [W_K q_C; q_P] · [c; r]        Σ a v = (Σ a c) · W_V

  so that all heads share one key [c; r] and one value c, and no array has N·S numbers.

  Args:
    query: `[B, T, N, H]`, H = C + P; the last P features are for `shared_key`.
    latent: c, `[B, S, R]`.
    key_kernel: W_K, `[R, N, C]`.
    value_kernel: W_V, `[R, N, V]`.
    shared_key: r, `[B, S, P]`; None means P = 0.
    value: `[B, S, K, D]`, in place of the values from `value_kernel`, for which D = V.
      With the identity, the output is the attention matrix.
    scale: factor of the logits; None means 1/√H.
    absorbed: whether to compute the absorbed form; the output is the same.
    block_size: (C, D), the queries and keys of a block, or one int for both.
    mask: boolean, True = attend, broadcastable to `[B, N, T, S]`.
    is_causal: query t sees only keys s ≤ t.
    query_segment_ids: `[B, T]`; a query sees only keys of its own segment.
    key_segment_ids: `[B, S]`.
    dropout_rate: fraction of the attention weights that are set to zero.
    dropout_rng: random key for dropout, required if `dropout_rate` > 0.
    axis_name: mesh axis of a sequence-sharded call, inside `jax.shard_map`.
    visible: the visible pairs, in addition to the other masking options.
    return_lse: whether to return the log-sum-exp of the logits as well.

  Returns:
    `[B, T, N, D]` in the dtype of `query`; with `return_lse` also `[B, T, N]` in
    float32.

  Cost: expanded, time T·S·N·(H+V), half of it if causal, and S·R·N·(C+V) for keys
  and values; absorbed, time T·S·N·(2·R+P) and T·R·N·(C+V). Memory: that of
  `flash_attention`, and S·N·(H+V) for keys and values or T·N·(2·R+P) for queries and
  results. Use the absorbed form for few queries.

  The caller projects the queries and normalizes the latent vectors.

  Paper: DeepSeek-V2, section 2.1, arXiv:2405.04434.
  """
  head_dim, dtype = query.shape[3], query.dtype
  shared = latent[:, :, :0] if shared_key is None else shared_key
  masks = [x for x in (mask, *getattr(visible, "masks", ())) if x is not None]
  # Gradients of the kernels are products with these arrays, so masked positions are 0.
  readable = Visible(masks=tuple(masks)).readable
  latent, shared = (readable(x[:, :, None])[:, :, 0] for x in (latent, shared))
  width = head_dim - shared.shape[2]
  if key_kernel.shape[2] != width:
    raise ValueError(
      f"key_kernel: expected C = H - P = {width}, got shape {key_kernel.shape}"
    )
  project = partial(jnp.einsum, preferred_element_type=dtype)
  if absorbed:
    content, rotary = jnp.split(query, [width], axis=3)
    content = project("btnc,rnc->btnr", content, key_kernel)
    query = jnp.concatenate([content, rotary], axis=3)
    key = jnp.concatenate([latent, shared], axis=2).astype(dtype)[:, :, None]
    values = latent.astype(dtype)[:, :, None] if value is None else value
    key = jnp.broadcast_to(key, (*key.shape[:2], values.shape[2], key.shape[3]))
  else:
    content = project("bsr,rnd->bsnd", latent, key_kernel)
    if value is None:
      values = project("bsr,rnv->bsnv", latent, value_kernel)
    else:
      values = jnp.repeat(value, content.shape[2] // value.shape[2], axis=2)
    shared = shared.astype(dtype)[:, :, None]
    shared = jnp.broadcast_to(shared, (*content.shape[:3], shared.shape[3]))
    key = jnp.concatenate([content, shared], axis=3)
  result: Any = flash_attention(
    query,
    key,
    values,
    mask=mask,
    is_causal=is_causal,
    # The absorbed form has a different head dimension.
    scale=checks.softmax_scale(scale, head_dim),
    query_segment_ids=query_segment_ids,
    key_segment_ids=key_segment_ids,
    dropout_rate=dropout_rate,
    dropout_rng=dropout_rng,
    block_size=block_size,
    axis_name=axis_name,
    visible=EVERY_PAIR if visible is None else visible,
    return_lse=return_lse,
  )
  out = result[0] if return_lse else result
  if absorbed and value is None:
    out = project("btnr,rnv->btnv", out, value_kernel)
  return (out, result[1]) if return_lse else out


class LatentCache(NamedTuple):
  """The latent vectors and shared keys of the `index` positions seen so far.

  Rows from `index` on are unset; S = max_length.
  """

  latent: Float[Array, "B S R"]
  shared_key: Float[Array, "B S P"]
  index: Int[Array, "B"]
  grows = True


@attention_factory
def latent(
  rank: int | None = None,
  shared_dim: checks.FromZero | None = None,
  down_bias: bool = False,
) -> Attention:
  """The mechanism of `latent_attention`.

    c_t = norm(x_t · W_c),   r_t = x_t · W_r

  Its `gates` compute both from the inputs x. A model with rotary positions rotates r
  and the last P features of each query.

  Args:
    rank: R; None means the paper's 4·C, C = H - P.
    shared_dim: P, below the head dimension H; None means the paper's H / 3, rounded
      down to an even number, which rotary positions need, and at least 2.
    down_bias: whether the projections W_c and W_r have biases.

  Returns:
    An `Attention` that computes its own keys and values ('own_keys'). It decodes in the
    absorbed form, with a `LatentCache` of R + P numbers per position. Its parameters
    are `down_kernel [F, R+P]`, `norm_scale [R]`, `key_kernel [R, N, H-P]` and
    `value_kernel [R, N, V]`, and with `down_bias` `down_bias [R+P]`.

  Raises:
    ValueError: an argument is out of range; by `init`, H is not above P.
  """

  def init(key, dims):
    checks.check_features("latent", dims.features)
    head_dim, num_heads = dims.head_dim, dims.num_heads
    rotary = 2 * max(1, head_dim // 6) if shared_dim is None else shared_dim
    width = head_dim - rotary
    if width < 1:
      raise ValueError(
        f"shared_dim: expected less than the head dimension {head_dim}, got "
        f"{rotary}"
      )
    size = 4 * width if rank is None else rank
    down, up_key, up_value = jax.random.split(key, 3)
    bias = {"down_bias": jnp.zeros(size + rotary)} if down_bias else {}
    return {
      "params": {
        **bias,
        "down_kernel": kernel(down, dims.features, size + rotary),
        "norm_scale": jnp.ones(size),
        "key_kernel": kernel(up_key, size, num_heads, width),
        "value_kernel": kernel(up_value, size, num_heads, dims.values),
      }
    }

  def gates(variables, inputs):
    p = variables["params"]
    x = layout.dot("btf,fr->btr", inputs, p["down_kernel"])
    if "down_bias" in p:
      x += p["down_bias"][None, None]
    latent, shared = jnp.split(x, p["norm_scale"].shape, axis=2)
    square = jnp.mean(jnp.square(latent), axis=2, keepdims=True)
    latent *= jax.lax.rsqrt(square + EPSILON) * p["norm_scale"][None, None]
    return {
      "latent": latent.astype(inputs.dtype),
      "shared_key": shared.astype(inputs.dtype),
    }

  def kernels(variables):
    p = variables["params"]
    return {name: p[name] for name in ("key_kernel", "value_kernel")}

  def apply(variables, query, key, value, **call) -> Any:
    own = "key_kernel", "value_kernel", "value", "absorbed"
    call = accepted_options("latent", latent_attention, call, own=own)
    if key is not None:
      raise ValueError(
        "key: latent attention computes its keys from `latent`; expected None"
      )
    check_gates("latent", call, "latent", "shared_key")
    latent = call.pop("latent")
    if latent.shape[1] != query.shape[1]:
      raise ValueError(
        "query: expected query and key of one sequence, got lengths "
        f"{query.shape[1]} and {latent.shape[1]}; for cross-attention use dense"
      )
    options = {"value": value, **kernels(variables), **call}
    return latent_attention(query, latent, **options)

  def init_cache(variables, batch, max_length, dims, dtype):
    p = variables["params"]
    size = p["norm_scale"].shape[0]
    widths = size, p["down_kernel"].shape[1] - size
    latent, shared = (jnp.zeros((batch, max_length, w), dtype) for w in widths)
    return LatentCache(latent, shared, jnp.zeros((batch,), jnp.int32))

  def decode(
    variables, cache, query, key, value, *, latent, shared_key, scale=None
  ):
    del key
    if value is not None:
      raise ValueError("value: expected None, as the cache stores no values")
    positions = jnp.arange(cache.latent.shape[1])[None, :]
    is_new = positions == cache.index[:, None]
    latents = layout.write(cache.latent, latent, is_new)
    shared = layout.write(cache.shared_key, shared_key, is_new)
    out: Any = latent_attention(
      query,
      latents,
      shared_key=shared,
      mask=(positions <= cache.index[:, None])[:, None, None],
      scale=scale,
      absorbed=True,
      **kernels(variables),
    )
    return out, LatentCache(latents, shared, cache.index + 1)

  def prefill(
    variables,
    cache,
    query,
    key,
    value,
    lengths,
    *,
    latent,
    shared_key,
    scale=None,
  ):
    # Rows beyond an example's length are overwritten before any query sees them.
    del variables, query, key, value, scale
    return LatentCache(
      layout.put(cache.latent, latent, 0),
      layout.put(cache.shared_key, shared_key, 0),
      lengths,
    )

  return Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    gates=gates,
    supports=dense().supports
    - own_logits.SUPPORTS
    - {"cross", "rowwise", "bias", "relative"}
    | {"own_keys"},
  )
