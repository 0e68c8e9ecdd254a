"""RG-LRU (Griffin): a gated linear recurrence of single channels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates, packing
from attention.recurrent.arrays import prepare_arrays, segment_starts
from attention.recurrent.elementwise import (
  elementwise_recurrence,
  input_coefficients,
  read_state,
)

_SHARPNESS = 8.0
"""c of equation 3."""

_MIN_SQUARE = 1e-12
"""The smallest 1 − a², because the derivative of its root is infinite at 0."""


@attention_function
def rg_lru_attention(
  value: Float[Array, "B T N V"],
  *,
  log_decay: Float[Array, "B T N V"],
  input_gate: Float[Array, "B T N V"],
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B N V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> (
  Float[Array, "B T N V"]
  | tuple[Float[Array, "B T N V"], Float[Array, "B N V"]]
):
  """Every channel is a decaying sum of gated values, without queries or keys.

    out = rg_lru_attention(x, log_decay=log_decay, input_gate=i)

    h_t = a_t ∘ h_{t−1} + √(1 − a_t²) ∘ (i_t ∘ v_t)        out_t = scale · h_t

  with a = exp(`log_decay`). All computation is in float32. The first
  unmasked position of a sequence or segment has a = 0, and so writes i ∘ v, unless it
  continues from an initial state.

  Args:
    value: the paper's x.
    log_decay: natural logarithms of a, at most 0.
    input_gate: i, from 0 to 1.
    scale: None means 1.
    initial_state: h before the first position; None means no initial state.
    mask: key mask `[B, 1, 1, T]`; at masked positions the state does not change.
    is_causal: must be True, because the recurrence runs forward.
    segment_ids: `[B, T]`; where they change, the state restarts at 0.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`.

  Cost: time and memory B·T·N·V, with gradients also one state for each chunk of C =
  `scan.CHUNK` positions. A CPU computes a chunk position by position, other devices by
  an associative scan in log₂ C steps.

  Paper: Griffin: mixing gated linear recurrences with local attention for efficient
  language models, arXiv:2402.19427, equation 4. As in its authors' code, the factor
  √(1 − a²) is 1 at the first position.
  """
  has_started = jnp.full(value.shape[0], initial_state is not None)
  state = packing.first_state(
    initial_state, value, value.shape[2:], "N, V", None
  )
  out, state = _recurrence(
    value,
    log_decay,
    input_gate,
    RgLruState(state, has_started),
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    segment_ids=segment_ids,
  )
  out = out.astype(value.dtype)
  return (out, state.state) if return_state else out


class RgLruState(NamedTuple):
  """The state from which a call continues; also the decode cache.

  Attributes:
    state: h.
    has_started: whether there were unmasked positions.
  """

  state: Float[Array, "B N V"]
  has_started: Bool[Array, "B"]


@attention_factory
def rg_lru() -> Attention:
  """Griffin's RG-LRU, with gates computed from its inputs x, the queries.

    r_t = sigmoid(x_t · W_a + b_a)        i_t = sigmoid(x_t · W_x + b_x)
    log a_t = −8 softplus(Λ) ∘ r_t
    h_t = a_t ∘ h_{t−1} + √(1 − a_t²) ∘ (i_t ∘ x_t)        out_t = h_t

  where W_a and W_x have a block for each head. The scale defaults to 1.

  Returns:
    A causal `Attention`, all of whose functions expect None as key and value; `apply`
    also accepts values. Its cache is an `RgLruState`, N·H numbers for
    each example. Its parameters are `decay_kernel` (W_a) and `input_kernel` (W_x), each
    `[N, H, H]`, `decay_bias`, `input_bias` and `log_rate` (Λ), each `[N, H]`.

  The paper's model also has `short_convolution` with biases and without an activation,
  and `output_gate='gelu_tanh'`. Values whose width is not H use the mean gates of their
  head. Paper: arXiv:2402.19427, equations 1 to 4; as in its section 2.4, Λ is
  drawn so that the decay at r = 1 is uniform from 0.9 to 0.999.
  """

  def init(key, dims):
    heads = dims.num_heads, dims.head_dim
    decay, inputs, rate = jax.random.split(key, 3)

    def kernel(key):
      shape = dims.head_dim, dims.num_heads, dims.head_dim
      return jnp.swapaxes(gates.kernel(key, *shape), 0, 1)

    min_decay = jax.random.uniform(rate, heads, minval=0.9, maxval=0.999)
    return {
      "decay_kernel": kernel(decay),
      "decay_bias": jnp.zeros(heads),
      "input_kernel": kernel(inputs),
      "input_bias": jnp.zeros(heads),
      "log_rate": jnp.log(jnp.expm1(-jnp.log(min_decay) / _SHARPNESS)),
    }

  def recurrence(
    params, query, key, value, *, initial_state, axis_name, **options
  ):
    del query, axis_name  # The sequence is never sharded.
    x = key.astype(jnp.float32)

    def gate(name):
      x_w = jnp.einsum("btnh,nhk->btnk", x, params[f"{name}_kernel"])
      return jax.nn.sigmoid(x_w + params[f"{name}_bias"][None, None])

    rate = _SHARPNESS * jax.nn.softplus(params["log_rate"])
    if initial_state is None:
      batch, _, *shape = value.shape
      initial_state = _empty_state(batch, *shape)
    return _recurrence(
      value,
      gates.gate_per_channel(-rate[None, None] * gate("decay"), value),
      gates.gate_per_channel(gate("input"), value),
      initial_state,
      **options,
    )

  def init_state(batch, dims):
    return _empty_state(batch, dims.num_heads, dims.values)

  mechanism = gates.recurrent_mechanism(
    "rg_lru", recurrence, init=init, init_state=init_state, is_sharded=False
  )
  return gates.query_only("rg_lru", mechanism)


def _empty_state(batch, *shape):
  state = jnp.zeros((batch, *shape), jnp.float32)
  return RgLruState(state, jnp.zeros(batch, bool))


def _recurrence(
  value, log_decay, input_gate, before, *, mask, is_causal, scale, segment_ids
):
  """The output in float32, and the final state."""
  (value, log_decay, input_gate), _, _ = prepare_arrays(
    value,
    (value, log_decay, input_gate),
    log_decay=None,
    mask=mask,
    is_causal=is_causal,
  )
  keep = checks.key_mask(mask, value, value)
  if keep is None:
    keep = jnp.ones(value.shape[:2], bool)
  starts, first = _starts(keep, before.has_started, segment_ids)
  resets = (starts | first)[:, :, None, None]
  square = -jnp.expm1(2.0 * jnp.where(resets, -jnp.inf, log_decay))
  weight = jnp.sqrt(jnp.maximum(square, _MIN_SQUARE))
  scale = 1.0 if scale is None else checks.softmax_scale(scale, 1)
  out, state = elementwise_recurrence(
    input_coefficients,
    read_state,
    (),
    before.state,
    (log_decay, weight * input_gate * value),
    starts | first,
  )
  return scale * out, RgLruState(
    state, before.has_started | jnp.any(keep, axis=1)
  )


def _starts(
  keep: Bool[Array, "B T"],
  has_started: Bool[Array, "B"],
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
  """The starts of all segments but the first, and the first unmasked positions.

  If `has_started`, the first segment has no first position.
  """
  starts = jnp.zeros(keep.shape, bool)
  if segment_ids is not None:
    starts = segment_starts(segment_ids, None)
  positions = jnp.arange(1, keep.shape[1] + 1)[None]
  start = jax.lax.cummax(jnp.where(starts, positions, 0), axis=1)
  start = jnp.maximum(start, jnp.where(has_started, 0, 1)[:, None])
  last = jax.lax.cummax(jnp.where(keep, positions, 0), axis=1)
  earlier = jnp.pad(last[:, :-1], ((0, 0), (1, 0)))
  return starts, keep & (earlier < start)
