"""A recurrence over a sequence in parts, at once on one device or one a device.

What a part does to a state is linear: S → M S + S', where S' is the state that the
part makes of nothing. M is diag(e^Σg) for the gated form, H×H for the delta rule:
the state that the part makes of I with values of 0. Two parts are one,

    (M₂, S₂) after (M₁, S₁) = (M₂ M₁, M₂ S₁ + S₂)

so the state before every part is an associative scan. Each part is then run from
that state. Across segments M is 0.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention.core import device_scan, halo, platform
from attention.recurrent import recurrence


class _Part(NamedTuple):
  """What a stretch of a sequence does to a state.

  Attributes:
    factor: M, H×H; D×1 is the diagonal of one, the same everywhere if D is 1.
    state: S'.
  """

  factor: Float[Array, "*A D L"]
  state: Float[Array, "*A H V"]


def attend(
  inputs: recurrence.Inputs, state: Float[Array, "B N H V"]
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N H V"]]:
  """`recurrence.attend`, on an accelerator in many parts at once.

  Args:
    inputs: of all positions.
    state: before the first one.

  Cost: with P > 1 parts, time of two or, with the delta rule, three calls and
  P·log₂ P products of H×H and H×V; memory of P states.
  """
  count = _parts_at_once(inputs, state.shape[3])
  if count == 1:
    return recurrence.attend(inputs, state)
  batch, length = inputs.query.shape[:2]
  cut = jax.tree.map(lambda x: _cut(x, count), inputs)
  continues = None
  if inputs.run is not None:
    cut = cut._replace(run=_cut(inputs.run, count, "edge"))
    runs = cut.run.reshape(batch, count, -1)
    ends = jnp.pad(runs[:, :-1, -1], ((0, 0), (1, 0)))
    continues = (ends == runs[:, :, 0]).reshape(-1)
    # Each part counts its segments from 0.
    cut = cut._replace(run=cut.run - cut.run[:, :1])
  own = _part(cut, state.shape[3], continues)
  own = jax.tree.map(lambda x: x.reshape(batch, count, *x.shape[1:]), own)
  until = jax.lax.associative_scan(_joined, own, axis=1)
  after = _through(until.factor, state[:, None]) + until.state
  before = jnp.concatenate([state[:, None], after[:, :-1]], axis=1)
  before = before.reshape(batch * count, *before.shape[2:])
  out, _ = recurrence.attend(cut, _where(continues, before))
  out = out.reshape(batch, -1, *out.shape[2:])[:, :length]
  return out, after[:, -1]


def attend_over_devices(
  inputs: recurrence.Inputs,
  segment_ids: Int[Array, "B T"] | None,
  axis_name: str,
) -> Float[Array, "B T N V"]:
  """`attend` of the whole from nothing, of which each device has a part.

  Args:
    inputs: of this device's positions.
    segment_ids: likewise.
    axis_name: of the devices, inside `jax.shard_map`.

  Cost: time of two or, with the delta rule, three calls on the part; what crosses
  is B·N·H·V numbers for each of ⌈log₂ D⌉ + 1 messages, and as many numbers of the
  factor: B·N or B·N·H, with the delta rule B·N·H².
  """
  value_dim = inputs.value.shape[3]
  if jax.lax.axis_size(axis_name) == 1:
    return attend(inputs, _nothing(inputs, value_dim))[0]
  continues = None
  if segment_ids is not None:
    before = halo.reached(segment_ids, 1, 0, axis_name)[:, 0]
    continues = before == segment_ids[:, 0]
  own = _part(inputs, value_dim, continues)
  neutral = jax.tree.map(jnp.zeros_like, own)
  initial = device_scan.before(own, _joined, neutral, axis_name).state
  return attend(inputs, _where(continues, initial))[0]


def _parts_at_once(inputs: recurrence.Inputs, value_dim: int) -> int:
  """How many parts of whole chunks the platform works on at once."""
  batch, length, num_heads, head_dim = inputs.query.shape
  size = recurrence.CHUNK
  of_position = 2 * (size + head_dim + value_dim)
  if inputs.log_decay.shape[3] > 1:
    of_position += recurrence.BLOCK * head_dim
  chunk_bytes = 4 * batch * num_heads * size * of_position
  return platform.tiles_at_once(chunk_bytes, -(-length // size))


def _cut(x: Array, count: int, mode: str = "constant") -> Array:
  """`[B, T, …]` as `[B·P, T/P, …]`, with positions at the end that do nothing."""
  missing = [(0, 0)] * x.ndim
  missing[1] = (0, -x.shape[1] % count)
  x = jnp.pad(x, missing, mode=mode)
  return x.reshape(len(x) * count, -1, *x.shape[2:])


def _nothing(
  inputs: recurrence.Inputs, value_dim: int
) -> Float[Array, "B N H V"]:
  batch, _, num_heads, head_dim = inputs.query.shape
  return jnp.zeros((batch, num_heads, head_dim, value_dim), jnp.float32)


def _where(condition: Bool[Array, "B"] | None, x: Array) -> Array:
  """`x` of some examples, 0 of the others."""
  if condition is None:
    return x
  return jnp.where(condition[:, None, None, None], x, 0.0)


def _part(
  inputs: recurrence.Inputs, value_dim: int, continues: Array | None
) -> _Part:
  """What these positions do to a state, whose segment `continues` or not."""
  _, state = recurrence.attend(inputs, _nothing(inputs, value_dim))
  return _Part(_where(continues, _factor(inputs)), state)


def _factor(inputs: recurrence.Inputs) -> Float[Array, "B N D L"]:
  """M of these positions, of which the first goes on in a segment."""
  batch, _, num_heads, head_dim = inputs.query.shape
  if inputs.beta is None:
    factor = jnp.exp(jnp.sum(inputs.log_decay, axis=1))[..., None]
    if inputs.run is None:
      return factor
    return _where(inputs.run[:, -1] == 0, factor)
  unit = jnp.broadcast_to(
    jnp.eye(head_dim)[None, None], (batch, num_heads, head_dim, head_dim)
  )
  values = jnp.zeros((*inputs.key.shape[:3], head_dim), jnp.float32)
  return recurrence.attend(inputs._replace(value=values), unit)[1]


def _joined(earlier: _Part, later: _Part) -> _Part:
  return _Part(
    _through(later.factor, earlier.factor),
    _through(later.factor, earlier.state) + later.state,
  )


def _through(
  factor: Float[Array, "*#A D L"], x: Float[Array, "*#A H V"]
) -> Float[Array, "*A H V"]:
  return factor * x if factor.shape[-1] == 1 else factor @ x
