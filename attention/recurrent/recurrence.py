"""Gated linear recurrences and delta rules, chunk by chunk.

For each head, with log decay g and erase key p,

    gated   S_t = S' + k_t v_tᵀ                  S' = diag(e^g_t) S_{t−1}
    delta   S_t = S' + k_t (v_t − S'ᵀ p_t)ᵀ        or S_{t−1}ᵀ p_t
    out_t = scale · S_tᵀ q_t

The writing strength β multiplies k. For the delta rule, p is k itself. Variants such as
Comba use a separate erase key, which reads S_{t−1}, the state before the decay. RWKV-7
subtracts the erased value at a key c instead of k:

    replaced   S_t = S' + k_t v_tᵀ − c_t (S_{t−1}ᵀ p_t)ᵀ

In RWKV-6, queries also read S_{t−1}: out_t = scale · S_{t−1}ᵀ q_t.

A chunk of C positions with initial state S is a sum over pairs. With G_ij = Σ g_u over
j < u ≤ i, G_i the sum from the start of the chunk, and A^x_ij = Σ_h x_ih k_jh e^G_ijh,

    out = (q ⊙ e^G_i) S + tril(A^q) u        S ← diag(e^G_C) S + (k ⊙ e^G_Cj)ᵀ u

where u = v for the gated form, and for the delta rule (WY form)

    u = U − W S        (I + stril(A^p)) [U, W] = [v, p ⊙ e^G_i]

If p or q reads S_{t−1}, its G, in A^p or A^q and as a factor, ends at i − 1. In the
replaced form u = v, and the erased values e add terms with c:

    (I + stril(B^p)) e = stril(A^p) v + (p ⊙ e^G_i) S        B^x_ij = Σ_h x_ih c_jh e^G_ijh
    out += −tril(B^q) e        S += −(c ⊙ e^G_Cj)ᵀ e

If decays are per channel or the state is small, a CPU computes long calls without
derivatives position by position (`_position`): only gradients need the chunked form.

Every exponent is a sum of log decays and never positive, so nothing overflows, and
terms that underflow are negligible. At the start of a segment, g is −10³⁰, which clears
the state. Masked positions and padding have g = 0 and k = p = v = 0.

A range of positions transforms a state linearly, S → M S + S', and (M₁, S₁) followed by
(M₂, S₂) is (M₂ M₁, M₂ S₁ + S₂). So an associative scan gives the state before each of
many chunks that are computed in parallel, or before each device.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import checks
from attention.platform import backend
from attention.recurrent import kernels, packing
from attention.recurrent.arrays import (
  chunks,
  prepare_arrays,
  repeat_heads,
  unchunk,
  unit_length,
)
from attention.recurrent.scan import (
  chunk_prefixes,
  chunk_size,
  chunks_per_step,
  device_prefix,
  is_sequence_sharded,
  scan,
)
from attention.recurrent.triangular import (
  decay_to_end,
  inverse,
  pair_decays,
  pairs,
  products,
  running_sum,
  shift,
)

_SMALL_STATE = 2**15
"""The largest size of a state that fits into a CPU's cache. With such a state,
computing position by position is faster even with one decay per head."""


def recurrent_attention(
  query: Float[Array, "B T Q H"],
  key: Float[Array, "B T K H"],
  value: Float[Array, "B T U V"],
  *,
  log_decay: Float[Array, "..."] | None = None,
  beta: Float[Array, "B T N"] | None = None,
  erase_key: Float[Array, "B T K H"] | None = None,
  erase_gate: Float[Array, "B T N H"] | None = None,
  write_gate: Float[Array, "B T N V"] | None = None,
  replacement: Float[Array, "B T N H"] | None = None,
  reads_previous_state: bool = False,
  mask: Bool[Array, "..."] | None = None,
  is_causal: bool = True,
  scale: float | Float[Array, ""] | None = None,
  initial_state: Float[Array, "B *G N H V"] | None = None,
  segment_ids: Int[Array, "B T"] | None = None,
  num_segments: int | None = None,
  return_state: bool = True,
  normalize_keys: bool = False,
  axis_name: str | None = None,
  implementation: kernels.Implementation | None = None,
  lower_bound: float | None = None,
) -> Any:
  """The recurrence of `gated_linear_attention` or `delta_rule_attention`.

  It is the delta rule if `beta`, `erase_key` or `erase_gate` is given. Then p is b ∘
  `erase_key`, which reads S_{t−1}, or b ∘ `key`, which reads S'. The recurrence writes
  w ∘ v at the key βk; the gates b, w and β default to 1. With a `replacement` c, the
  value that `erase_key` reads is subtracted at c. With `reads_previous_state`, queries
  read S_{t−1}. With `normalize_keys`, queries and keys are normalised by `unit_length`.
  The `lower_bound` of log decays is for kernels.

  With `axis_name`, each device has a shard of the sequence, inside `jax.shard_map`; the
  first starts from the zero state.

  Raises:
    ValueError: `log_decay` or the mask has a wrong shape, or the call is not causal.

  Cost: time T·N·(C·(H+V) + H·V); the delta rule adds T·N·C·(C+2H+V). With a sharded
  sequence twice that, or thrice with the delta rule; devices exchange ⌈log₂ D⌉ + 1
  messages of B·N·H·V numbers for the state and, for M, B·N or B·N·H numbers, or B·N·H²
  with the delta rule.
  """
  has_decays, dtype = log_decay is not None, jnp.result_type(query, key, value)
  query = repeat_heads(query, key, value)
  arrays = key, value, erase_key, erase_gate, write_gate, replacement
  beta = None if beta is None else beta[..., None]
  options = {"mask": mask, "is_causal": is_causal, "axis_name": axis_name}
  packed = None
  if implementation != "jla":  # The kernels handle segments themselves.
    options["segment_ids"] = segment_ids
    if num_segments is not None:
      packed = packing.make_packing(query, num_segments, options)
  arrays, log_decay, starts = prepare_arrays(
    query, (*arrays, beta), log_decay=log_decay, **options
  )
  key, value, erase, erase_gate, write_gate, replacement, beta = arrays
  if normalize_keys:
    query, key = unit_length(query).astype(query.dtype), unit_length(key)
  state = None
  if initial_state is not None or packed is not None:
    shape = *query.shape[2:], value.shape[3]
    state = packing.first_state(
      initial_state, value, shape, "N, H, V", num_segments
    )
  if implementation == "jla":
    out, state = kernels.recurrence(
      query,
      key,
      value,
      log_decay,
      decays=has_decays,
      beta=beta,
      erase_key=erase,
      erase_gate=erase_gate,
      write_gate=write_gate,
      replacement=replacement,
      lower_bound=lower_bound,
      dtype=dtype,
      scale=scale,
      initial_state=state,
      segment_ids=segment_ids,
      num_segments=num_segments,
      axis_name=axis_name,
    )
    return (out, state) if return_state else out
  previous = _ReadsPrevious(erase is not None, reads_previous_state)
  if erase is None and not (beta is None and erase_gate is None):
    erase = key
  if erase_gate is not None:
    erase = erase * erase_gate
  if write_gate is not None:
    value *= write_gate
  if beta is not None:
    key *= beta
  scale = checks.softmax_scale(scale, query.shape[3])
  scaled = query.astype(jnp.float32) * scale
  if starts is not None and previous.erase:
    erase = jnp.where(starts, 0.0, erase)
  if starts is not None and previous.query:
    scaled = jnp.where(starts, 0.0, scaled)
  inputs = scaled, key, value, log_decay, erase, replacement
  if is_sequence_sharded(axis_name):
    own = _transition(previous, *inputs)
    first = jax.tree.map(jnp.zeros_like, own)
    _, state = device_prefix(join_states, first, own, axis_name)
  if packed is None:
    out, state = _attend(previous, inputs, state)
  else:
    attend = functools.partial(_attend, previous, size=packed.size)
    out, state = packed.run(
      lambda inputs, resets: attend(inputs, None, resets=resets), inputs, state
    )
  out = out.astype(query.dtype)
  return (out, state) if return_state else out


def state_before(
  key: Float[Array, "B T N H"],
  value: Float[Array, "B T N V"],
  log_decay: Float[Array, "B T N D"],
  axis_name: str,
) -> Float[Array, "B N H V"]:
  """The state of gated linear attention after the shards of all earlier devices.

  The last axis of `log_decay` has size 1 or H.
  """
  option = log_decay[..., 0] if log_decay.shape[3] == 1 else log_decay
  _, state = recurrent_attention(key, key, value, log_decay=option)
  own = jnp.exp(jnp.sum(log_decay, axis=1))[..., None], state
  first = jax.tree.map(jnp.zeros_like, own)
  return device_prefix(join_states, first, own, axis_name)[1]


class _ReadsPrevious(NamedTuple):
  """Whether erase keys and queries read S_{t−1} instead of S' and S_t."""

  erase: bool
  query: bool


def _attend(previous, inputs, state, *, resets=None, size=None):
  """The results and the last state, or with `resets` the states after each chunk.

  Args:
    previous: which arrays read S_{t−1}, a `_ReadsPrevious`.
    inputs: queries `[B, T, N, H]`, keys, values `[B, T, N, V]`, log decays
      `[B, T, N, 1 or H]`, and erase keys and replacements `[B, T, N, H]` or None, in
      float32, with 0 at masked positions.
    state: `[B, N, H, V]`, or None for 0.
    resets: the resets of a `Packing` with chunks of C = `size`.
    size: C; None chooses it by the length.
  """
  query, _, value, log_decay, *_ = inputs
  batch, length, num_heads, head_dim = query.shape
  value_dim, size = value.shape[3], size or chunk_size(length)
  count = chunks_per_step(query, size, 2 * (size + head_dim + value_dim))
  is_empty = state is None and resets is None
  if state is None:
    shape = batch, num_heads, head_dim, value_dim
    state = jnp.zeros_like(value, shape=shape)
  step = functools.partial(_step, count, previous)
  position = None
  is_small = backend.is_at_most(state.size, _SMALL_STATE)
  if resets is None and (log_decay.shape[-1] > 1 or is_small):
    position = functools.partial(_position, previous)
  state, out = scan(
    step,
    (),
    state,
    (*inputs, resets and packing.pad_to_steps(resets, count)),
    size=size * count,
    is_empty=is_empty,
    position=position,
  )
  return out if resets is not None else (out, state)


class _Inputs(NamedTuple):
  """Queries, keys, values, log decays, p and c of a position or a chunk."""

  query: Array
  key: Array
  value: Array
  log_decay: Array
  erase: Array | None = None
  replacement: Array | None = None


def _position(previous, params, state, inputs):
  """The step of one position `[B, N, ·]`, as papers write it."""
  del params
  x = _Inputs(*inputs[:-1])  # The last is `resets`, which only chunks use.
  before, decayed = state, jnp.exp(x.log_decay)[..., None] * state
  erase_state = before if previous.erase else decayed
  if x.erase is None:
    state = decayed + _outer(x.key, x.value)
  elif x.replacement is None:
    state = decayed + _outer(x.key, x.value - _read(erase_state, x.erase))
  else:
    erased = _outer(x.replacement, _read(erase_state, x.erase))
    state = decayed + _outer(x.key, x.value) - erased
  return state, _read(before if previous.query else state, x.query)


def _outer(key, value):
  return key[..., None] * value[..., None, :]


def _read(state, key):
  return jnp.einsum("bnh,bnhv->bnv", key, state)


def _step(count, previous, params, state, inputs):
  """The step of `count` consecutive chunks `[B, N, count, C, ·]`."""
  del params
  *arrays, resets = inputs
  x = _Inputs(*chunks(arrays, count))
  decays = running_sum(x.log_decay)
  from_start = jnp.exp(decays)
  factor = jnp.swapaxes(from_start[..., -1:, :], -2, -1)
  _, decayed_query = _reader(x.query, decays, previous.query)
  if x.erase is None:
    update, correction = _gated_form(x, decays, previous)
  elif x.replacement is None:
    update, correction = _delta_form(x, decays, previous)
  else:
    update, correction = _replaced_form(x, decays, previous)
  before = None if state is None else state[:, :, None]
  if count > 1 or resets is not None:
    transition = factor
    if correction is not None:
      unit = jnp.eye(x.key.shape[-1], dtype=x.key.dtype)[None, None, None]
      transition = factor * unit - correction()
    first: Any = jnp.zeros_like(transition[:, :, :1]), before
    own = transition, update(None)[1]
    _, before = chunk_prefixes(
      join_states, first, own, packing.head_resets(resets, transition)
    )
  out, after = update(before)
  if before is not None:
    out += decayed_query @ before
    after += factor * before
  out = unchunk(out)
  if resets is not None:
    out = packing.with_states(out, after)
  return after[:, :, -1], out


# Each form returns two functions. `update` maps the state before the chunk to the terms
# that are added to the results and to the state, without the decayed state itself. The
# other returns what is subtracted from the decays in the matrix M of S → M S + S'; it
# is None for the gated form.


def _gated_form(x, decays, previous):
  """The gated form: u = v."""
  query, _ = _reader(x.query, decays, previous.query)
  [[scores]] = _scores([query], [x.key], x.log_decay)
  scores = _visible_scores(scores, previous.query)
  key = _decayed_to_end(x.key, x.log_decay)
  return lambda _: (scores @ x.value, key @ x.value), None


def _delta_form(x, decays, previous):
  """The delta rule: u = (I + stril(A^p))⁻¹ (v − (p ⊙ e^G) S)."""
  query, _ = _reader(x.query, decays, previous.query)
  erase, decayed_erase = _reader(x.erase, decays, previous.erase)
  [[scores, overlaps]] = _scores([query, erase], [x.key], x.log_decay)
  scores = _visible_scores(scores, previous.query)
  key = _decayed_to_end(x.key, x.log_decay)
  solution = inverse(_earlier_scores(overlaps, previous.erase))

  def update(before):
    error = x.value if before is None else x.value - decayed_erase @ before
    u = solution @ error
    return scores @ u, key @ u

  return update, lambda: key @ (solution @ decayed_erase)


def _replaced_form(x, decays, previous):
  """The replaced form: values are added at k, and the value at p is subtracted at c."""
  query, _ = _reader(x.query, decays, previous.query)
  erase, decayed_erase = _reader(x.erase, decays, previous.erase)
  readers, keys = [query, erase], [x.key, x.replacement]
  key_scores, replacement_scores = _scores(readers, keys, x.log_decay)
  scores, erased_scores = (
    _visible_scores(s[0], previous.query)
    for s in (key_scores, replacement_scores)
  )
  overlaps = _earlier_scores(key_scores[1], previous.erase)
  solution = inverse(_earlier_scores(replacement_scores[1], previous.erase))
  key, replacement = (_decayed_to_end(k, x.log_decay) for k in keys)

  def update(before):
    erased = overlaps @ x.value
    if before is not None:
      erased += decayed_erase @ before
    e = solution @ erased
    return (
      scores @ x.value - erased_scores @ e,
      key @ x.value - replacement @ e,
    )

  return update, lambda: replacement @ (solution @ decayed_erase)


def _decayed_to_end(key, log_decay):
  """Keys decayed to the end of their chunk, `[B, N, G, H, C]`."""
  to_end = jnp.exp(decay_to_end(log_decay))
  return jnp.swapaxes(key * to_end, -2, -1)


def _reader(x, decays, reads_previous):
  """Queries or erase keys for scores, and the same decayed from the chunk's start."""
  if reads_previous:
    # Reading S_{i−1} at position i is like reading S_i at position i − 1.
    return shift(x, -1), x * jnp.exp(shift(decays, 1))
  return x, x * jnp.exp(decays)


def _visible_scores(scores, reads_previous):
  """The scores of queries for the positions in the state that they read."""
  return _earlier_scores(scores, True) if reads_previous else jnp.tril(scores)


def _earlier_scores(scores, reads_previous):
  """The scores for earlier positions of the chunk."""
  return jnp.tril(shift(scores, 1) if reads_previous else scores, -1)


def _transition(previous, query, key, value, log_decay, erase, replacement):
  """(M, S') of a range of positions; M is H×H, or D×1 if it is diagonal."""
  if erase is None:
    factor = jnp.exp(jnp.sum(log_decay, axis=1))[..., None]
    inputs = query, key, value, log_decay, None, None
    return factor, _attend(previous, inputs, None)[1]
  # One call for both: the last state from I with values of 0, and from 0 with `value`.
  batch, _, num_heads, size = key.shape
  state = jnp.eye(size, size + value.shape[3], dtype=key.dtype)[None, None]
  state = jnp.broadcast_to(state, (batch, num_heads, *state.shape[2:]))
  value = jnp.concatenate([jnp.zeros_like(key), value], axis=3)
  inputs = query, key, value, log_decay, erase, replacement
  state = _attend(previous, inputs, state)[1]
  return state[..., :size], state[..., size:]


def join_states(
  earlier: tuple[Array, Array], later: tuple[Array, Array]
) -> tuple[Array, Array]:
  """(M, S') of the union of two consecutive ranges of positions."""

  def transform(x):
    return factor * x if factor.shape[-1] == 1 else factor @ x

  factor, state = later
  return transform(earlier[0]), transform(earlier[1]) + state


def _scores(readers, keys, log_decay):
  """A^x_ij `[B, N, G, C, C]` for each key and each reader x; arbitrary where i < j."""
  if log_decay.shape[-1] > 1:
    return pairs(readers, keys, log_decay)
  decay = pair_decays(log_decay)
  return jax.tree.map(lambda x: x * decay, products(readers, keys))
