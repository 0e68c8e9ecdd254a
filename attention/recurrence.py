"""A state that decays and learns from keys and values, chunk by chunk.

For each head, with g the logarithm of a decay and β a rate,

    gated   S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ
    delta   S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ        S' = diag(e^g_t) S_{t−1}
    out_t = scale · S_tᵀ q_t

A chunk of C positions that begins with the state S is a sum over pairs. With G_ij =
Σ g_u over j < u ≤ i, G_i that from the beginning on, and A^x_ij = Σ_h x_ih k_jh e^G_ijh,

    out = (q ⊙ e^G_i) S + tril(A^q) u        S ← diag(e^G_C) S + (k ⊙ e^G_Cj)ᵀ u

where u = v for the gated form, and for the delta rule (WY form)

    u = U − W S        (I + diag(β) stril(A^k)) [U, W] = diag(β) [v, k ⊙ e^G_i]

Every exponent is a sum of decays, hence never positive: nothing overflows, and what
underflows is nothing. Where a segment begins, g is −10³⁰, and nothing of what was
before is left. A position that is hidden or appended has g = β = 0 and k = v = 0.

What a stretch of positions does to a state is linear, S → M S + S', and two stretches
are one: (M₂, S₂) after (M₁, S₁) is (M₂ M₁, M₂ S₁ + S₂). So an associative scan gives
the state before each of many chunks that are worked on at once, or before each device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, sharded
from attention.features import (
  chunk_size,
  chunks_per_step,
  pairs,
  rest,
  triangle,
)
from attention.scan import chunk_prefixes, device_prefix, scan

FORGOTTEN = -1e30
"""The logarithm of a decay that leaves nothing; finite, so that sums are."""


def recurrent_attention(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  *,
  log_decay: Float[Array, "..."] | None = None,
  beta: Float[Array, "B T N"] | None = None,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  return_state: bool = True,
  axis_name: str | None = None,
) -> Any:
  """The recurrence of `gated_linear_attention`, and with `beta` of the delta rule.

  With `axis_name`, each device has a part of the sequence, inside `jax.shard_map`; the
  first begins with no state.

  Raises:
    ValueError: `log_decay` or the mask does not fit, or the call is not causal.

  Cost: time T·N·(C·(H+V) + H·V), with the delta rule T·N·C·(C+2H+V) more. On devices
  twice or, with the delta rule, thrice that; what crosses is B·N·H·V numbers for each
  of ⌈log₂ D⌉ + 1 messages, and as many numbers of M: B·N or B·N·H, with the delta
  rule B·N·H².
  """
  heads, head_dim = query.shape[:3], query.shape[3]
  if not is_causal:
    raise ValueError(
      "is_causal: expected True, got False; a recurrence is causal by definition; "
      "use linear or dense attention in both directions"
    )
  if log_decay is None:
    log_decay = jnp.zeros(heads, jnp.float32)
  if log_decay.shape not in (heads, query.shape):
    raise ValueError(
      f"log_decay: expected [B, T, N] = {heads}, or [B, T, N, H] = "
      f"{query.shape}, got {log_decay.shape}"
    )
  instead = "dense attention takes masks that vary"
  keep = arguments.key_mask(mask, query, key, instead)

  def seen(x):
    x = x.astype(jnp.float32)
    return x if keep is None else jnp.where(keep[:, :, None, None], x, 0.0)

  def by_head(x):
    return jnp.repeat(seen(x), heads[2] // x.shape[2], axis=2)

  log_decay = seen(log_decay.reshape(*heads, -1))
  is_part = axis_name is not None and jax.lax.axis_size(axis_name) > 1
  if segment_ids is not None:
    if is_part:
      before = sharded.reached(segment_ids, 1, 0, axis_name)[:, :-1]
    else:
      # The first of all goes on from the initial state.
      before = jnp.concatenate([segment_ids[:, :1], segment_ids[:, :-1]], 1)
    begins = (segment_ids != before)[..., None, None]
    log_decay = jnp.where(begins, FORGOTTEN, log_decay)
  inputs = (
    query.astype(jnp.float32) * arguments.softmax_scale(scale, head_dim),
    by_head(key),
    by_head(value),
    log_decay,
    None if beta is None else seen(beta[..., None]),
  )
  state = initial_state
  if state is not None:
    state = state.astype(jnp.float32)
  if is_part:
    own = _stretch(*inputs)
    first = jax.tree.map(jnp.zeros_like, own)
    _, state = device_prefix(_joined, first, own, axis_name)
  out, state = _attend(inputs, state)
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def _attend(inputs, state):
  """The scan.

  Args:
    inputs: queries `[B, T, N, H]`, keys, values `[B, T, N, V]`, log-decays
      `[B, T, N, 1 or H]` and β `[B, T, N, 1]` or None, float32. Those of hidden
      positions are 0.
    state: `[B, N, H, V]`, or None for 0.
  """
  query, _, value, *_ = inputs
  batch, length, num_heads, head_dim = query.shape
  value_dim, size = value.shape[3], chunk_size(length)
  count = chunks_per_step(query, size, 2 * (size + head_dim + value_dim))
  is_empty = state is None
  if state is None:
    shape = batch, num_heads, head_dim, value_dim
    state = jnp.zeros_like(value, shape=shape)
  step, size = functools.partial(_step, count), count * size
  state, out = scan(step, (), state, inputs, size=size, is_empty=is_empty)
  return out, state


def _step(count, params, state, inputs):
  """`count` chunks, `[B, N, count, C, ·]`, of which each begins as the last ends."""
  del params

  def rows(x):
    x = x.reshape(len(x), count, -1, *x.shape[2:])
    return x.transpose(0, 3, 1, 2, 4)

  query, key, value, log_decay, beta = jax.tree.map(rows, inputs)
  from_start = jnp.exp(jnp.cumsum(log_decay, axis=3))
  written = jnp.swapaxes(key * jnp.exp(rest(log_decay)), -2, -1)
  factor = jnp.swapaxes(from_start[..., -1:, :], -2, -1)
  known, solution = key * from_start, None
  if beta is None:
    (scores,) = _scores([query], key, log_decay)
  else:
    scores, overlaps = _scores([query, key], key, log_decay)
    solution = _inverse(jnp.tril(beta * overlaps, -1))
  before = None if state is None else state[:, :, None]
  if count > 1:
    through, made = factor, value
    if solution is not None:
      made = solution @ (beta * value)
      unit = jnp.eye(key.shape[-1])[None, None, None]
      through = factor * unit - written @ (solution @ (beta * known))
    first = jnp.zeros_like(through[:, :, :1]), before
    _, before = chunk_prefixes(_joined, first, (through, written @ made))
  if solution is not None:
    error = value if before is None else value - known @ before
    value = solution @ (beta * error)
  out = jnp.tril(scores) @ value
  after = written @ value
  if before is not None:
    out += (query * from_start) @ before
    after += factor * before
  out = out.transpose(0, 2, 3, 1, 4)
  return after[:, :, -1], out.reshape(len(out), -1, *out.shape[3:])


def _stretch(query, key, value, log_decay, beta):
  """(M, S') of these positions; M is H×H, or D×1 for the diagonal of one."""
  if beta is None:
    factor = jnp.exp(jnp.sum(log_decay, axis=1))[..., None]
    return factor, _attend((query, key, value, log_decay, None), None)[1]
  # Together the state that they make of I with values of 0, and of 0 with theirs.
  batch, _, num_heads, size = key.shape
  state = jnp.eye(size, size + value.shape[3])[None, None]
  state = jnp.broadcast_to(state, (batch, num_heads, *state.shape[2:]))
  value = jnp.concatenate([jnp.zeros_like(key), value], axis=3)
  state = _attend((query, key, value, log_decay, beta), state)[1]
  return state[..., :size], state[..., size:]


def _joined(earlier, later):
  """(M, S') of two stretches."""

  def through(x):
    return factor * x if factor.shape[-1] == 1 else factor @ x

  factor, state = later
  return through(earlier[0]), through(earlier[1]) + state


def _scores(readers, key, log_decay):
  """A^x_ij `[B, N, G, C, C]` of each reader x; any finite number where i < j."""
  if log_decay.shape[-1] > 1:
    return pairs(readers, key, log_decay)
  # A difference of two long sums would lose its digits.
  is_later = jnp.tri(key.shape[-2], k=-1, dtype=bool)
  decay = jnp.exp(jnp.cumsum(jnp.where(is_later, log_decay, 0.0), axis=-2))
  return [jnp.einsum("...ch,...sh->...cs", x, key) * decay for x in readers]


@jax.custom_jvp
def _inverse(lower: Float[Array, "B N G C C"]) -> Float[Array, "B N G C C"]:
  """(I + L)⁻¹ of L that is 0 on and above its diagonal, by halves.

    [[A, 0], [X, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ X A⁻¹, D⁻¹]]

  which is forward substitution with blocks for numbers, and as stable.
  """
  size = lower.shape[-1]
  if size == 1:
    return jnp.ones_like(lower)
  half = size // 2
  own = [lower[..., :half, :half], lower[..., half:, half:]]
  own = jnp.stack(own, axis=3).reshape(*lower.shape[:2], -1, half, half)
  own = _inverse(own)
  across = own[:, :, 1::2] @ lower[..., half:, :half] @ own[:, :, ::2]
  return triangle(own, -across)


@_inverse.defjvp
def _inverse_jvp(primals, tangents):
  inverse = _inverse(*primals)
  return inverse, -(inverse @ tangents[0] @ inverse)
