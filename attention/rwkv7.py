"""RWKV-7: each position removes one key from a state and adds two."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.arrays import unit_length
from attention.recurrent.kernels import Implementation
from attention.recurrent.recurrence import recurrent_attention

_MIN_LOG_DECAY = -(2.718281828459045**-0.5)
"""The smallest log decay, −e^(−½)."""


@attention_function
def rwkv7_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "B T N H"],
  removal: Float[Array, "B T N H"],
  replacement: Float[Array, "B T N H"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = False,
  implementation: Implementation | None = None,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B *G N H V"]]
):
  """Each position moves the value stored for one key to another key, and adds k vᵀ.

    out = rwkv7_attention(q, k, v, log_decay=g, removal=a, replacement=b)

    S_t = diag(e^g_t) S_{t−1} + b_t (S_{t−1}ᵀ a_t)ᵀ + k_t v_tᵀ
    out_t = scale · S_tᵀ q_t

  for each head. The moved value is read before the decay. With a = −κ, b = α ∘ κ and
  |κ| = 1, as in the paper, the state does not grow. All computation is in float32.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    log_decay: g, at most 0.
    removal: a.
    replacement: b.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1/√H.
    initial_state: the state before the first position; None means 0.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    num_segments: G, for one initial and one final state per segment.
    return_state: whether to return the last state as well.
    implementation: 'xla' or None; 'jla' is a GPU kernel of another package.

  Results and errors: as in `gated_linear_attention`.

  Cost: that of `delta_rule_attention` with decays for each channel, with twice the
  pairs of keys, because each position writes both b and k.

  Paper: RWKV-7 "Goose" with expressive dynamic state evolution, arXiv:2503.14456,
  equations 17 and 18.
  """
  return recurrent_attention(
    query,
    key,
    value,
    log_decay=log_decay,
    erase_key=-removal,
    replacement=replacement,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    initial_state=initial_state,
    segment_ids=segment_ids,
    num_segments=num_segments,
    return_state=return_state,
    implementation=implementation,
  )


@attention_factory
def rwkv7(
  rank: int = 32, implementation: Implementation | None = None
) -> Attention:
  """RWKV-7's time mixing, without its token shift.

    g_t = −e^(−½) sigmoid(tanh(x_t · W₁) · W₂ + w₀)
    α_t = sigmoid(x_t · A₁ · A₂ + a₀)        κ_t = ξ ∘ k_t, of length 1
    k'_t = k_t ∘ (1 + (α_t − 1) ∘ ζ)
    S_t = diag(e^g_t) S_{t−1} − (α_t ∘ κ_t)(S_{t−1}ᵀ κ_t)ᵀ + k'_t v_tᵀ
    out_t = S_tᵀ q_t + (q_t · (ρ ∘ k'_t)) v_t

  w₀, a₀, ξ, ζ and ρ have one number for each channel of each head. The scale defaults
  to 1.

  Args:
    rank: R of W₁, A₁ `[F, R]` and W₂, A₂ `[R, N, H]`.
    implementation: as in `gated_linear`.

  Returns:
    A causal `Attention` with `gates`, with the cache of `gated_linear`. Its
    parameters are `decay_down`, `decay_up`, `decay_bias` (w₀), `rate_down`, `rate_up`,
    `rate_bias` (a₀), `removal_scale` (ξ), `rate_share` (ζ) and `bonus` (ρ).

  Raises:
    ValueError: `rank` is not a positive int.

  The paper's model also has `output_norm='group'`, and `output_gate='sigmoid_first'` with
  an `output_gate_rank` (equation 14). Four points differ from the paper:
  `short_convolution` replaces the token shift, values are not mixed with those of the
  first layer, the bonus ρ is added before the group norm, and the initial w₀ rises from
  −5.5 to 0.5 over the channels of each head. In the authors' code, it rises over the
  channels of all heads, and varies by ±2.5 within each head.
  Paper: arXiv:2503.14456, section 4.
  """

  def init(key, dims):
    keys = jax.random.split(key, 4)
    heads = dims.num_heads, dims.head_dim
    # From slow to fast decays over the channels of a head.
    steps = jnp.linspace(0.0, 1.0, dims.head_dim)
    bias = jnp.broadcast_to((6.0 * steps - 5.5)[None], heads)
    return {
      "decay_down": gates.kernel(keys[0], dims.features, rank),
      "decay_up": 0.1 * gates.kernel(keys[1], rank, *heads),
      "decay_bias": bias,
      "rate_down": gates.kernel(keys[2], dims.features, rank),
      "rate_up": 0.1 * gates.kernel(keys[3], rank, *heads),
      "rate_bias": jnp.full(heads, -0.19),
      "removal_scale": jnp.full(heads, 0.71),
      "rate_share": jnp.ones(heads),
      "bonus": jnp.full(heads, -0.04),
    }

  def log_decay(params, inputs):
    x = jnp.tanh(gates.project(inputs, params["decay_down"]))
    x = gates.project(x, params["decay_up"]) + params["decay_bias"][None, None]
    return _MIN_LOG_DECAY * jax.nn.sigmoid(x)

  def rate(params, inputs):
    x = gates.project(inputs, params["rate_down"], params["rate_up"])
    return jax.nn.sigmoid(x + params["rate_bias"][None, None])

  def recurrence(params, query, key, value, *, rate, scale, **options):
    def channels(name):
      return params[name][None, None]

    new_key = key.astype(jnp.float32)
    removal = unit_length(channels("removal_scale") * new_key)
    new_key *= 1.0 + (rate - 1.0) * channels("rate_share")
    out, state = recurrent_attention(
      query,
      new_key.astype(key.dtype),
      value,
      erase_key=removal,
      replacement=rate * removal,
      scale=1.0 if scale is None else scale,
      lower_bound=1.005 * _MIN_LOG_DECAY,  # With a margin for rounding.
      **options,
    )
    weight = query.astype(jnp.float32) * channels("bonus") * new_key
    return out + jnp.sum(weight, axis=-1, keepdims=True) * value, state

  return gates.recurrent_mechanism(
    "rwkv7",
    recurrence,
    implementation=implementation,
    init=init,
    gates={"log_decay": log_decay, "rate": rate},
    arrays={
      "log_decay": Float[Array, "B T N H"],
      "rate": Float[Array, "B T N H"],
    },
  )
