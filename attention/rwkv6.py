"""RWKV-6 (Finch): each query reads the state before its own update, plus a bonus."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.platform.layout import zero_masked
from attention.recurrent import gates
from attention.recurrent.arrays import repeat_heads
from attention.recurrent.recurrence import recurrent_attention


@attention_function
def rwkv6_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N H"],
  bonus: Float[Array, "N H"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B *G N H V"]]
):
  """Each query reads the decaying state of earlier positions and its own value.

    out = rwkv6_attention(q, k, v, log_decay=g, bonus=u)

    out_t = scale · (S_{t−1} + (u ∘ k_t) v_tᵀ)ᵀ q_t
    S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ

  for each head. The paper's r and w are q and e^g. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, V]`.
    log_decay: g, at most 0.
    bonus: u.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    initial_state: the state before the first position; None means 0.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`. At masked
  positions, the output is 0 or a reading of the state, without a bonus.

  Cost: that of `gated_linear_attention` with decays for each channel.

  Paper: Eagle and Finch: RWKV with matrix-valued states and dynamic recurrence,
  arXiv:2404.05892, section 4.
  """
  return _recurrence(**locals())


def _recurrence(
  query, key, value, *, bonus, scale, mask, return_state=True, **options
) -> Any:
  """`rwkv6_attention`, for sequence-sharded inputs as well."""
  query = repeat_heads(query, key, value)
  dtype, num_heads = query.dtype, query.shape[2]
  out, state = recurrent_attention(
    query,
    key,
    value,
    mask=mask,
    scale=scale,
    reads_previous_state=True,
    **options,
  )
  keep = checks.key_mask(mask, query, query)

  def expand_heads(x):
    x = jnp.repeat(x.astype(jnp.float32), num_heads // x.shape[2], axis=2)
    return zero_masked(x, keep)

  scale = checks.softmax_scale(scale, query.shape[3])
  weight = expand_heads(query) * bonus[None, None] * expand_heads(key)
  own = scale * jnp.sum(weight, axis=-1, keepdims=True) * expand_heads(value)
  out = (out + own).astype(dtype)
  return (out, state) if return_state else out


@attention_factory
def rwkv6(rank: int = 64) -> Attention:
  """RWKV-6's time mixing, without its token shift.

    g_t = −exp(tanh(x_t · W₁) · W₂ + w₀)
    out_t = (S_{t−1} + (u ∘ k_t) v_tᵀ)ᵀ q_t        S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ

  w₀ and u have one number for each channel of each head. The scale defaults to 1.

  Args:
    rank: R of W₁ `[F, R]` and W₂ `[R, N, H]`.

  Returns:
    A causal `Attention` with `gates`, with the cache of `gated_linear`. Its
    parameters are `decay_down`, `decay_up`, `decay_bias` (w₀) and `bonus` (u).

  Raises:
    ValueError: `rank` is not a positive int.

  The paper's model also has `output_norm='group'` and `output_gate='silu'`.
  `short_convolution` replaces the token shift, whose weights depend on the inputs. As
  in the authors' code, w₀ rises over all channels from −6 to −1, but in equal steps, so
  that initial decays are slow. Paper: arXiv:2404.05892, section 4.
  """

  def init(key, dims):
    down, up = jax.random.split(key)
    heads = dims.num_heads, dims.head_dim
    channels = jnp.arange(heads[0] * heads[1])
    ramp = channels / max(len(channels) - 1, 1)
    return {
      "decay_down": gates.kernel(down, dims.features, rank),
      "decay_up": 0.1 * gates.kernel(up, rank, *heads),
      "decay_bias": (5.0 * ramp - 6.0).reshape(heads),
      "bonus": 0.1 * ((channels + 1.0) % 3.0 - 1.0).reshape(heads),
    }

  def log_decay(params, inputs):
    x = jnp.tanh(gates.project(inputs, params["decay_down"]))
    x = gates.project(x, params["decay_up"]) + params["decay_bias"][None, None]
    return -jnp.exp(x)

  def recurrence(params, query, key, value, *, scale, **options):
    scale = 1.0 if scale is None else scale
    options |= {"bonus": params["bonus"], "scale": scale}
    return _recurrence(query, key, value, **options)

  return gates.recurrent_mechanism(
    "rwkv6",
    recurrence,
    init=init,
    gates={"log_decay": log_decay},
    arrays={"log_decay": Float[Array, "B T N H"]},
  )
