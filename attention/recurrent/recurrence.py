"""A state that decays and learns from keys and values, chunk by chunk.

For each head, with g the logarithm of a decay and β a rate,

    gated   S_t = diag(e^g_t) S_{t−1} + k_t v_tᵀ
    delta   S_t = diag(e^g_t) S_{t−1} + β_t k_t (v_t − (diag(e^g_t) S_{t−1})ᵀ k_t)ᵀ
    out_t = scale · S_tᵀ q_t

Within a chunk of C positions that begins with the state S, both are sums over the
chunk. With G_ij = Σ g_u over j < u ≤ i, and G_i that from the beginning on,

    A^x_ij = Σ_h x_ih k_jh e^G_ijh
    out = scale · ((q ⊙ e^G_i) S + tril(A^q) u)
    S ← diag(e^G_C) S + (k ⊙ e^G_Cj)ᵀ u

where u = v for the gated form, and for the delta rule u solves the unit lower
triangle (WY form)

    (I + diag(β) stril(A^k)) u = diag(β) (v − (k ⊙ e^G_i) S)

Every exponent is such a sum of decays, hence never positive: nothing overflows, and
what underflows is nothing. With a decay for each channel, A has a sum over channels
of its own for each pair. It is taken in blocks of `BLOCK` positions: pairs of two
blocks split at the beginning of the later one, which makes them a product of
matrices, and only pairs within a block are done one by one.

The backward has the state of each chunk and makes the rest of a chunk again. The
last chunk moves back to end with the sequence, so that no array is padded.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments
from attention.core import layout

CHUNK = 64
"""C."""

BLOCK = 8
"""Positions whose pairs are done one by one where channels decay apart."""


class Inputs(NamedTuple):
  """What a recurrence reads; float32, every head with keys of its own.

  Attributes:
    query: times the scale.
    key: zeros where a position is hidden.
    value: zeros where a position is hidden.
    log_decay: at most 0; 0 where a position is hidden. D is 1 or H.
    beta: of the delta rule, 0 where a position is hidden; None is the gated form.
    run: the number of the segment that a position is in, from 0.
  """

  query: Float[Array, "B T N H"]
  key: Float[Array, "B T N H"]
  value: Float[Array, "B T N V"]
  log_decay: Float[Array, "B T N D"]
  beta: Float[Array, "B T N"] | None
  run: Int[Array, "B T"] | None


def prepared(
  name: str,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T K V"],
  log_decay: Float[Array, "..."] | None,
  beta: Float[Array, "B T N"] | None,
  *,
  mask: Bool[Array, "..."] | None,
  is_causal: bool,
  scale: float | Float[Array, ""] | None,
  initial_state: Float[Array, "B N H V"] | None,
  segment_ids: Int[Array, "B T"] | None,
) -> tuple[Inputs, Float[Array, "B N H V"]]:
  """Checks the arguments of a recurrence, and makes them what `attend` takes.

  Args:
    name: of the function, for messages; the others are its arguments.

  Raises:
    ValueError: they do not fit together, or a call is not causal.
  """
  arguments.check_qkv(query, key, value)
  batch, length, num_heads, head_dim = query.shape
  if not is_causal:
    raise ValueError(
      f"is_causal: expected True, got False; {name} attention is causal by "
      "definition; use linear or dense attention in both directions"
    )
  if key.shape[1] != length:
    raise ValueError(
      f"key: expected the length of query, {length}, got {key.shape[1]}; a "
      "recurrence reads one sequence"
    )
  of_heads = (batch, length, num_heads)
  if log_decay is None:
    log_decay = jnp.zeros(of_heads, jnp.float32)
  if log_decay.shape not in (of_heads, (*of_heads, head_dim)):
    raise ValueError(
      f"log_decay: expected [B, T, N] = {of_heads}, or [B, T, N, H] = "
      f"{(*of_heads, head_dim)}, got {log_decay.shape}"
    )
  if beta is not None and beta.shape != of_heads:
    raise ValueError(f"beta: expected [B, T, N] = {of_heads}, got {beta.shape}")
  if segment_ids is not None and segment_ids.shape != (batch, length):
    raise ValueError(
      f"segment_ids: expected [B, T] = {(batch, length)}, got "
      f"{segment_ids.shape}"
    )
  shape = (batch, num_heads, head_dim, value.shape[3])
  if initial_state is None:
    initial_state = jnp.zeros(shape, jnp.float32)
  if initial_state.shape != shape:
    raise ValueError(
      f"initial_state: expected [B, N, H, V] = {shape}, got "
      f"{initial_state.shape}"
    )
  keep = arguments.key_mask(
    mask, query, key, "dense attention takes masks that vary"
  )
  if log_decay.ndim == 3:
    log_decay = log_decay[..., None]
  run = None
  if segment_ids is not None:
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    run = jnp.cumsum(jnp.pad(changes, ((0, 0), (1, 0))), axis=1)

  def seen(x):
    x = x.astype(jnp.float32)
    if keep is None:
      return x
    return jnp.where(keep.reshape(*keep.shape, *[1] * (x.ndim - 2)), x, 0.0)

  def of_head(x):
    return jnp.repeat(seen(x), num_heads // x.shape[2], axis=2)

  factor = arguments.softmax_scale(scale, head_dim)
  inputs = Inputs(
    query.astype(jnp.float32) * factor,
    of_head(key),
    of_head(value),
    seen(log_decay),
    None if beta is None else seen(beta),
    run,
  )
  return inputs, initial_state.astype(jnp.float32)


@jax.custom_vjp
def attend(
  inputs: Inputs, state: Float[Array, "B N H V"]
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
  """Results, and the state after the last position.

  Args:
    inputs: of all positions.
    state: before the first one.

  Cost: time T·N·(C·(H+V) + H·V), and 12·T·N·H exponentials where channels decay
  apart; memory of one chunk, and for gradients N·H·V for each chunk and gradients
  like the inputs.
  """
  out, state, _ = _forward(inputs, state, keeps_states=False)
  return out, state


def _forward(inputs, state, *, keeps_states):
  """The loop over chunks; also the states that they begin with."""
  cut = _chunks(inputs)
  kept = cut.number if keeps_states else 0
  states = jnp.zeros((kept, *state.shape), jnp.float32)
  out = jnp.zeros_like(inputs.value)

  def step(i, carry):
    out, state, states = carry
    if keeps_states:
      states = jax.lax.dynamic_update_index_in_dim(states, state, i, 0)
    found, state = _chunk(_read(inputs, cut, i), state)
    start = cut.start(i)
    is_new = cut.is_new(i)
    if is_new is not None:
      old = layout.cut(out, start, cut.size)
      found = jnp.where(is_new[None, :, None, None], found, old)
    return layout.put(out, found, start), state, states

  return jax.lax.fori_loop(0, cut.number, step, (out, state, states))


def _attend_fwd(inputs, state):
  out, last, states = _forward(inputs, state, keeps_states=True)
  return (out, last), (inputs, states)


def _attend_bwd(residuals, cotangents):
  inputs, states = residuals
  of_out, of_state = cotangents
  cut = _chunks(inputs)
  trained = inputs._replace(run=None)

  def step(done, carry):
    of_state, totals = carry
    i = cut.number - 1 - done
    start, chunk = cut.start(i), _read(inputs, cut, i)
    g = layout.cut(of_out, start, cut.size)
    if chunk.is_new is not None:
      g = jnp.where(chunk.is_new[None, :, None, None], g, 0.0)

    def of_chunk(some, state):
      return _chunk(chunk.of(some), state)

    _, pull = jax.vjp(of_chunk, chunk.trained, states[i])
    of_chunk_inputs, of_state = pull((g, of_state))
    totals = jax.tree.map(
      lambda total, x: layout.add(total, x, start), totals, of_chunk_inputs
    )
    return of_state, totals

  zeros = jax.tree.map(jnp.zeros_like, trained)
  of_state, totals = jax.lax.fori_loop(0, cut.number, step, (of_state, zeros))
  return totals._replace(run=None), of_state


attend.defvjp(_attend_fwd, _attend_bwd)


class _Chunk(NamedTuple):
  """The inputs of C positions.

  Attributes:
    trained: those with a derivative.
    is_new: False for positions that the chunk before had; None is all.
    run: of the positions, and of the one before them.
  """

  trained: Inputs
  is_new: Bool[Array, "C"] | None
  run: tuple[Int[Array, "B C"], Int[Array, "B 1"]] | None

  def of(self, trained: Inputs) -> "_Chunk":
    """The same chunk of other numbers."""
    return self._replace(trained=trained)


def _chunks(inputs: Inputs) -> layout.Blocks:
  length = inputs.query.shape[1]
  return layout.Blocks(length, min(CHUNK, length))


def _read(inputs: Inputs, cut: layout.Blocks, i: Array) -> _Chunk:
  """Chunk i; the last one moves back to end with the sequence."""
  start = cut.start(i)
  trained = jax.tree.map(
    lambda x: layout.cut(x, start, cut.size), inputs._replace(run=None)
  )
  runs = None
  if inputs.run is not None:
    first = jnp.maximum(i * cut.size - 1, 0)
    runs = (
      layout.cut(inputs.run, start, cut.size),
      layout.cut(inputs.run, first, 1),
    )
  return _Chunk(trained, cut.is_new(i), runs)


def _chunk(
  chunk: _Chunk, state: Float[Array, "B N H V"]
) -> tuple[Float[Array, "B C N V"], Float[Array, "B N H V"]]:
  """Results of C positions, and the state after them."""
  query, key, value, log_decay, beta, _ = jax.tree.map(
    lambda x: jnp.swapaxes(x, 1, 2), chunk.trained
  )
  if chunk.is_new is not None:
    # What the chunk before has done is not done again.
    is_new = chunk.is_new[None, None, :, None]
    key = jnp.where(is_new, key, 0.0)
    log_decay = jnp.where(is_new, log_decay, 0.0)
  size = query.shape[2]
  at_start = jnp.exp(jnp.cumsum(log_decay, axis=2))
  to_end = jnp.exp(_rest(log_decay))
  of_state = at_start[:, :, -1, :, None]
  pairs = jnp.tri(size, dtype=bool)[None, None]
  if chunk.run is not None:
    run, before = chunk.run
    pairs &= (run[:, :, None] == run[:, None, :])[:, None]
    # What the state gives to this segment, and this segment to the state.
    continues = (run == before)[:, None, :, None]
    at_start = jnp.where(continues, at_start, 0.0)
    is_last = (run == run[:, -1:])[:, None, :, None]
    to_end = jnp.where(is_last, to_end, 0.0)
    of_state = jnp.where(continues[:, :, -1, :, None], of_state, 0.0)
  readers = [query] if beta is None else [query, key]
  sums = [jnp.where(pairs, x, 0.0) for x in _between(readers, key, log_decay)]
  if beta is not None:
    known = beta[..., None] * jnp.tril(sums[1], -1)
    found = jnp.einsum("bnch,bnhv->bncv", key * at_start, state)
    value = _solved(known, beta[..., None] * (value - found))
  out = jnp.einsum("bnch,bnhv->bncv", query * at_start, state)
  out += jnp.einsum("bncs,bnsv->bncv", sums[0], value)
  state = of_state * state + jnp.einsum("bnch,bncv->bnhv", key * to_end, value)
  return jnp.swapaxes(out, 1, 2), state


@jax.custom_vjp
def _solved(
  lower: Float[Array, "B N C C"], right: Float[Array, "B N C V"]
) -> Float[Array, "B N C V"]:
  """U with (I + L) u = right, where L has zeros on and above its diagonal."""
  return jnp.einsum("bncs,bnsv->bncv", _inverse(lower), right)


def _solved_fwd(lower, right):
  inverse = _inverse(lower)
  found = jnp.einsum("bncs,bnsv->bncv", inverse, right)
  return found, (inverse, found)


def _solved_bwd(residuals, cotangent):
  inverse, found = residuals
  of_right = jnp.einsum("bncs,bncv->bnsv", inverse, cotangent)
  return -jnp.einsum("bncv,bnsv->bncs", of_right, found), of_right


_solved.defvjp(_solved_fwd, _solved_bwd)


def _inverse(lower: Float[Array, "B N C C"]) -> Float[Array, "B N C C"]:
  """(I + L)⁻¹ by blocks of 1, 2, 4, … positions.

    [[A, 0], [X, D]]⁻¹ = [[A⁻¹, 0], [−D⁻¹ X A⁻¹, D⁻¹]]

  which is forward substitution with blocks for numbers, and as stable.
  """
  batch, num_heads, size, _ = lower.shape
  whole = 1 << (size - 1).bit_length()
  missing = whole - size
  lower = jnp.pad(lower, ((0, 0), (0, 0), (0, missing), (0, missing)))
  found = jnp.ones((batch, num_heads, whole, 1, 1), jnp.float32)
  width = 1
  while width < whole:
    count = whole // (2 * width)
    blocks = lower.reshape(batch, num_heads, count, 2, width, count, 2, width)
    across = jnp.diagonal(blocks[:, :, :, 1, :, :, 0], axis1=2, axis2=4)
    across = jnp.moveaxis(across, -1, 2)
    first, second = found[:, :, ::2], found[:, :, 1::2]
    across = -second @ across @ first
    above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    below = jnp.concatenate([across, second], axis=-1)
    found = jnp.concatenate([above, below], axis=-2)
    width *= 2
  return found[:, :, 0, :size, :size]


def _rest(
  log_decay: Float[Array, "B N C D"],
) -> Float[Array, "B N C D"]:
  """Σ over the positions after each one."""
  # Padded first: there may be no position at all.
  later = jnp.pad(log_decay, ((0, 0), (0, 0), (0, 1), (0, 0)))[:, :, 1:]
  return jnp.cumsum(later[:, :, ::-1], axis=2)[:, :, ::-1]


def _sums(
  log_decay: Float[Array, "B N C D"],
) -> Float[Array, "B N C C D"]:
  """G_ij, 0 where i ≤ j. A difference of two long sums would lose its digits."""
  size = log_decay.shape[2]
  is_later = jnp.tri(size, k=-1, dtype=bool)[None, None, :, :, None]
  terms = jnp.where(is_later, log_decay[:, :, :, None], 0.0)
  return jnp.cumsum(terms, axis=2)


def _between(
  readers: list[Float[Array, "B N C H"]],
  key: Float[Array, "B N C H"],
  log_decay: Float[Array, "B N C D"],
) -> list[Float[Array, "B N C C"]]:
  """A_ij of each reader; any finite number where i < j."""
  if log_decay.shape[-1] == 1:
    decays = jnp.exp(_sums(log_decay)[..., 0])
    return [jnp.einsum("bnch,bnsh->bncs", x, key) * decays for x in readers]
  rows: list[list[Array]] = [[] for _ in readers]
  for start in range(0, key.shape[2], BLOCK):
    here = slice(start, start + BLOCK)
    own, earlier = log_decay[:, :, here], log_decay[:, :, :start]
    later = key.shape[2] - start - own.shape[2]
    decayed = key[:, :, here, None] * jnp.exp(_sums(own)).swapaxes(2, 3)
    keys = key[:, :, :start] * jnp.exp(_rest(earlier))
    since = jnp.exp(jnp.cumsum(own, axis=2))
    for row, x in zip(rows, readers, strict=True):
      x = x[:, :, here]
      parts = [
        jnp.einsum("bnch,bnsh->bncs", x * since, keys),
        jnp.einsum("bnch,bnsch->bncs", x, decayed),
      ]
      parts = jnp.concatenate(parts, axis=3)
      row.append(jnp.pad(parts, ((0, 0), (0, 0), (0, 0), (0, later))))
  return [jnp.concatenate(row, axis=2) for row in rows]
