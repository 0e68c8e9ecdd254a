"""TTT-Linear: a linear model that learns to map keys to values at test time.

The model's weights and bias are one matrix of H+1 rows, because queries and keys get a
last channel of 1. All positions of a mini-batch take gradients at its initial weights,
so matrix products compute a mini-batch (the paper's dual form).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.decorators import attention_factory, attention_function
from attention.mechanism import Attention
from attention.recurrent import gates
from attention.recurrent.arrays import prepare_arrays, repeat_heads
from attention.recurrent.minibatches import minibatches
from attention.recurrent.packing import first_states
from attention.recurrent.scan import CHUNK, scan


class TttState(NamedTuple):
  """The state from which a call continues; also the decode cache.

  Attributes:
    change: weights and bias before the current mini-batch, minus the initial ones.
    gradient: Σ η ∇ over the positions of the current mini-batch.
    count: the number of positions in the current mini-batch.
  """

  change: Float[Array, "B N X H"]
  gradient: Float[Array, "B N X H"]
  count: Int[Array, "B"]


@attention_function
def ttt_linear_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U H"],
  *,
  learning_rate: Float[Array, "B T N"],
  initial_weights: Float[Array, "N H H"],
  initial_bias: Float[Array, "N H"],
  norm_scale: Float[Array, "N H"],
  norm_bias: Float[Array, "N H"],
  position_offset: Float[Array, "C"] | None = None,
  minibatch_size: int = 16,
  epsilon: float = 1e-6,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: TttState | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], TttState]:
  """Applies to each query a linear model that gradient descent fits to (k, v) pairs.

    out = ttt_linear_attention(q, k, v, learning_rate=eta, initial_weights=w,
        initial_bias=b, norm_scale=gamma, norm_bias=beta)

    ℓ_s(W, b) = ½ |LN(k_s W + b) + k_s − v_s|²
    (W_t, b_t) = (W, b) − c_i Σ_s η_s ∇ℓ_s(W, b)        c_i = max(1/i + o_i, 0)
    out_t = q_t + LN(q_t W_t + b_t)

  for each head, where t is position i = 1, …, C of its mini-batch, s are the positions
  up to t of the mini-batch, and (W, b) are those after the last position before it. LN
  is a layer norm with a scale and a bias for each head. The output is not linear in
  values. All computation is in float32.

  Args:
    query: `[B, T, Q, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, U, H]`, of the same width as keys.
    learning_rate: η, at least 0.
    initial_weights: W before the first position.
    initial_bias: b before the first position.
    norm_scale: the scale of LN.
    norm_bias: the bias of LN.
    position_offset: o; None means 0.
    minibatch_size: C. With 1, each gradient is taken at the weights after the previous
      position.
    epsilon: ε of LN.
    mask: key mask `[B, 1, 1, T]`; masked positions are in no mini-batch and output
      zeros.
    is_causal: must be True, because the recurrence runs forward.
    scale: factor of the queries; None means 1.
    initial_state: the `TttState` before the first position; None means that of
      `initial_weights` and `initial_bias`.
    segment_ids: `[B, T]`; where they change, a mini-batch starts from
      `initial_weights` and `initial_bias`.
    return_state: whether to return the last state as well.

  Results and errors: as in `gated_linear_attention`; the state is a `TttState`.

  Cost: time T·N·H·(3H + 2C); memory B·T·N·H, with gradients also two states for each
  chunk of `scan.CHUNK` positions. With a mask, segments or an initial state,
  mini-batches may start anywhere, and a step computes two: time T·N·H·(9H + 2C).

  Paper: Learning to (learn at test time): RNNs with expressive hidden states,
  arXiv:2407.04620, sections 2.3 to 2.5 and 2.7; the bias, the ½ and o are those of its
  code.
  """
  query, dtype = repeat_heads(query, key, value), query.dtype
  batch, length, num_heads, head_dim = query.shape
  arrays = query, key, value, learning_rate[..., None]
  arrays, _, starts = prepare_arrays(
    query,
    arrays,
    log_decay=None,
    mask=mask,
    is_causal=is_causal,
    segment_ids=segment_ids,
  )
  query, key, value, rate = arrays
  query *= 1.0 if scale is None else checks.softmax_scale(scale, head_dim)
  minibatch_rates = _position_rate(minibatch_size, position_offset)
  initial = jnp.concatenate([initial_weights, initial_bias[:, None]], axis=1)
  initial = initial.astype(jnp.float32)[None]
  empty = _empty_state(batch, num_heads, head_dim)
  state = first_states(initial_state, empty, "a TttState")
  batches = minibatches(query, mask, starts, state.count, minibatch_size)
  opens = batches.starts[:, :, None, None]
  if not (mask is None and starts is None and initial_state is None):
    # Mini-batches may start anywhere.
    opens = jnp.stack([batches.starts, batches.segment_starts], axis=2)[
      :, :, None
    ]
  position_rates = minibatch_rates[batches.offset][..., None, None]
  # The last channel of 1 reads and writes the bias.
  query, key = (
    jnp.concatenate([x, jnp.ones_like(rate)], axis=3) for x in (query, key)
  )
  window = min(minibatch_size, length)
  num_windows = min(-(-CHUNK // window), -(-length // window))
  last = minibatch_rates[-1]
  params = initial, last, _expand_heads(norm_scale), _expand_heads(norm_bias)
  state, out = scan(
    functools.partial(_step, epsilon, num_windows),
    params,
    (initial + state.change, state.gradient),
    (query, key, value, rate, position_rates, opens),
    size=window * num_windows,
  )
  out += query[..., :-1]
  if mask is not None:
    out = jnp.where(batches.keep[..., None, None], out, 0.0)
  out = out.astype(dtype)
  state = TttState(state[0] - initial, state[1], batches.count)
  return (out, state) if return_state else out


def _expand_heads(x):
  """`[N, H]` as `[1, N, 1, H]` in float32."""
  return x.astype(jnp.float32)[None, :, None]


def _position_rate(size, offset):
  """c_i = max(1/i + o_i, 0) for i = 1, …, C."""
  rate = 1.0 / jnp.arange(1, size + 1, dtype=jnp.float32)
  if offset is None:
    return rate
  if offset.shape != (size,):
    raise ValueError(
      f"position_offset: expected [C] = {(size,)}, got {offset.shape}"
    )
  return jnp.maximum(rate + offset.astype(jnp.float32), 0.0)


def _empty_state(batch, num_heads, head_dim):
  zeros = jnp.zeros((batch, num_heads, head_dim + 1, head_dim), jnp.float32)
  return TttState(zeros, zeros, jnp.zeros(batch, jnp.int32))


def _step(epsilon, count, params, state, inputs):
  """`count` windows of positions, `[B, count·W, N, ·]`."""

  def windows(x):
    x = x.reshape(x.shape[0], count, -1, *x.shape[2:])
    return x.transpose(1, 0, 3, 2, 4)

  inputs = jax.tree.map(windows, inputs)
  window = functools.partial(_window, epsilon, params)
  state, out = jax.lax.scan(window, state, inputs)
  out = out.transpose(1, 0, 3, 2, 4)
  return state, out.reshape(out.shape[0], -1, *out.shape[3:])


def _window(epsilon, params, state, inputs):
  """A mini-batch `[B, N, W, ·]`, or W ≤ C positions in which mini-batches may start."""
  initial, last, norm_scale, norm_bias = params
  weights, gradient = state
  query, key, value, rate, position_rates, opens = inputs
  norm = functools.partial(_layer_norm, epsilon, norm_scale, norm_bias)

  def error(predicted):
    """∇ of ½ |LN(z) + k − v|² with respect to z = k W + b."""
    out, norm_vjp = jax.vjp(norm, predicted)
    return norm_vjp(out + key[..., :-1] - value)[0]

  writes = jnp.swapaxes(key * rate, 2, 3)
  causal = jnp.tri(key.shape[2], dtype=bool)[None, None]
  if opens.shape[3] == 1:
    # A window is a mini-batch. Padding does not change the state.
    opens, same_minibatch = opens[:, :, :1], causal
    weights = jnp.where(opens, weights - last * gradient, weights)
    errors, own = error(key @ weights), query @ weights
    gradient = jnp.where(opens, 0.0, gradient) + writes @ errors
  else:
    # First positions of the mini-batch of `state`, then, if it is complete, of the next
    # one, and then of segments that start here.
    number = jnp.any(opens, axis=3, keepdims=True)
    number = jnp.cumsum(number, axis=2, dtype=jnp.int32)
    in_new_segment = jnp.cumsum(opens[..., 1:], axis=2, dtype=jnp.int32) > 0
    in_first = number == 0
    earlier = jnp.where(in_first, error(key @ weights), 0.0)
    updated = weights - last * (gradient + writes @ earlier)

    def predict(x):
      later = jnp.where(in_new_segment, x @ initial, x @ updated)
      return jnp.where(in_first, x @ weights, later)

    errors, own = error(predict(key)), predict(query)
    own -= jnp.where(in_first, position_rates * (query @ gradient), 0.0)
    same_minibatch = causal & (number == jnp.swapaxes(number, 2, 3))
    is_last = jnp.swapaxes(number == number[:, :, -1:], 2, 3)
    ends_in_first = in_first[:, :, -1:]
    later = jnp.where(in_new_segment[:, :, -1:], initial, updated)
    weights = jnp.where(ends_in_first, weights, later)
    gradient = jnp.where(ends_in_first, gradient, 0.0)
    gradient += jnp.where(is_last, writes, 0.0) @ errors
  scores = query @ jnp.swapaxes(key * rate, 2, 3)
  scores = jnp.where(same_minibatch, position_rates * scores, 0.0)
  return (weights, gradient), norm(own - scores @ errors)


def _layer_norm(epsilon, scale, bias, x):
  x -= jnp.mean(x, axis=-1, keepdims=True)
  return scale * gates.rms_norm(x, epsilon) + bias


@attention_factory
def ttt_linear(minibatch_size: int = 16, base_rate: float = 1.0) -> Attention:
  """TTT-Linear, with learning rates computed from the inputs of its layer.

    η_t = η₀ · sigmoid(x_t · W_η + b_η) / H

  Args:
    minibatch_size: C.
    base_rate: η₀.

  Returns:
    A causal `Attention` with `gates`, whose values have the width H and whose
    cache is a `TttState`. Its parameters are `rate_kernel [F, N]`, `rate_bias [N]`,
    `initial_weights [N, H, H]`, `initial_bias [N, H]`, `norm_scale [N, H]`,
    `norm_bias [N, H]` and `position_offset [C]`.

  Raises:
    ValueError: `minibatch_size` is not a positive int, or `base_rate` is not above 0.

  The paper's model also has `short_convolution`, `output_norm='rms_joint'` and
  `output_gate='gelu_tanh'`. In the paper's layer, queries and keys are two convolutions
  of one projection, rotated by the position in the mini-batch, and the last norm is a
  layer norm. Paper: arXiv:2407.04620, sections 2.3 to 2.7.
  """
  if not base_rate > 0.0:
    raise ValueError(f"base_rate: expected a number above 0, got {base_rate!r}")

  def init(key, dims):
    rate, weights = jax.random.split(key)
    heads = dims.num_heads, dims.head_dim
    return {
      "rate_kernel": gates.kernel(rate, dims.features, heads[0]),
      "rate_bias": jnp.zeros(heads[0]),
      "initial_weights": 0.02 * jax.random.normal(weights, (*heads, heads[1])),
      "initial_bias": jnp.zeros(heads),
      "norm_scale": jnp.ones(heads),
      "norm_bias": jnp.zeros(heads),
      "position_offset": jnp.zeros(minibatch_size),
    }

  def learning_rate(params, inputs):
    x = gates.affine_gate("rate", jax.nn.sigmoid)(params, inputs)
    return base_rate * x / params["norm_scale"].shape[1]

  def recurrence(params, *qkv, axis_name, **options):
    del axis_name  # The sequence is never sharded.
    own = {k: x for k, x in params.items() if not k.startswith("rate_")}
    options |= {"minibatch_size": minibatch_size, "return_state": True}
    out, state = ttt_linear_attention(*qkv, **own, **options)
    return out, state

  mechanism = gates.recurrent_mechanism(
    "ttt_linear",
    recurrence,
    init=init,
    gates={"learning_rate": learning_rate},
    arrays={
      "learning_rate": Float[Array, "B T N"],
      "value": Float[Array, "B T U H"],
    },
    init_state=lambda batch, dims: _empty_state(
      batch, dims.num_heads, dims.head_dim
    ),
    is_sharded=False,
  )
  return mechanism._replace(linear_in_values=False)
