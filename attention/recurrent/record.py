"""The plug of a mechanism that is a recurrence with its own decays and rates."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.recurrent import parts, recurrence

Params = Mapping[str, Array]
Gates = Mapping[str, Array]


class Operands(NamedTuple):
  """The arrays of a recurrence, made of those of a call.

  Attributes:
    query: `[B, T, N, H]`.
    key: `[B, T, K, H]`.
    value: `[B, T, K, V]`.
    log_decay: `[B, T, N]` or `[B, T, N, H]`; None is 0.
    beta: `[B, T, N]` of the delta rule; None is the gated form.
  """

  query: Float[Array, "B T N H"]
  key: Float[Array, "B T K H"]
  value: Float[Array, "B T K V"]
  log_decay: Float[Array, "..."] | None = None
  beta: Float[Array, "B T N"] | None = None


def record(
  name: str,
  operands: Callable[[Params, Array, Array, Array, Gates], Operands],
  *,
  init: Callable[[Array, plug.Dims], plug.Variables] = plug.no_variables,
  gates: Callable[[Params, Array], dict[str, Array]] | None = None,
  reads: tuple[str, ...] = (),
  skip: Callable[[Params, Array, Array], Array] | None = None,
  scale: float | None = None,
) -> plug.Attention:
  """The plug of a recurrence.

  Args:
    name: of the mechanism, for messages.
    operands: `(params, query, key, value, gates)`, with 0 for hidden values.
    init: `(key, dims) -> variables`, none but 'params'.
    gates: `(params, inputs) -> {option: array}`.
    reads: the names of these options.
    skip: `(params, out, value)`: what is made of the result in addition.
    scale: of a call without one; None is 1/√H.

  Returns:
    An `Attention` whose cache is the state `[B, N, H, V]` of each example.
  """
  own_scale = scale

  def run(variables, query, key, value, state, axis_name, call):
    call = arguments.accepted_options(name, _call, call)
    options, given = _call(**call), {}
    for option in GATES:
      gate = call.pop(option, None)
      if (gate is not None) != (option in reads):
        raise ValueError(_unread(name, option, reads))
      if gate is not None:
        given[option] = gate
    arguments.check_qkv(query, key, value)
    mask, same = _visible(options, query, key)
    if mask is not None:
      value = jnp.where(mask[:, 0, 0, :, None, None], value, 0)
    params = variables.get("params", {})
    made = operands(params, query, key, value, given)
    inputs, state = recurrence.prepared(
      name,
      *made,
      mask=mask,
      is_causal=options.is_causal,
      scale=own_scale if options.scale is None else options.scale,
      initial_state=state,
      segment_ids=options.key_segment_ids,
    )
    if axis_name is None:
      out, state = parts.attend(inputs, state)
    else:
      ids = options.key_segment_ids
      out = parts.attend_over_devices(inputs, ids, axis_name)
    if skip is not None:
      out = skip(params, out, value)
    if same is not None:
      out = jnp.where(same[..., None, None], out, 0.0)
    return out.astype(query.dtype), state

  def apply(variables, query, key, value, **call):
    return run(variables, query, key, value, None, None, call)[0]

  def apply_sharded(variables, query, key, value, *, axis_name, **call):
    return run(variables, query, key, value, None, axis_name, call)[0]

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables, max_length, dtype
    shape = (batch, dims.num_heads, dims.head_dim, dims.values)
    return jnp.zeros(shape, jnp.float32)

  def decode(variables, state, query, key, value, **call):
    call["is_causal"] = True
    return run(variables, query, key, value, state, None, call)

  def prefill(variables, state, query, key, value, lengths, **call):
    is_read = jnp.arange(query.shape[1])[None, :] < lengths[:, None]
    call |= {"is_causal": True, "mask": is_read[:, None, None, :]}
    return run(variables, query, key, value, state, None, call)[1]

  def read(variables, inputs):
    assert gates is not None
    return gates(variables["params"], inputs)

  return plug.Attention(
    init=init,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    apply_sharded=apply_sharded,
    supports=frozenset({"causal", "mask", "segments", "decode", "sequence"}),
    cost="linear",
    causal_only=True,
    gates=gates and read,
  )


GATES = ("log_decay", "beta")
"""Options of a call that `gates` give."""


class _Options(NamedTuple):
  mask: Bool[Array, "..."] | None
  is_causal: bool
  scale: float | Array | None
  query_segment_ids: Int[Array, "B T"] | None
  key_segment_ids: Int[Array, "B T"] | None


def _call(
  *,
  mask=None,
  is_causal=False,
  scale=None,
  query_segment_ids=None,
  key_segment_ids=None,
  log_decay=None,
  beta=None,
) -> _Options:
  """The options that are not gates; its signature is what a call may have."""
  del log_decay, beta
  return _Options(mask, is_causal, scale, query_segment_ids, key_segment_ids)


def _unread(name: str, option: str, reads: tuple[str, ...]) -> str:
  """What is wrong with a gate that is missing or too many."""
  if option in reads:
    return (
      f"{option}: {name} attention reads it from what queries are projected "
      "from, got none; give the call **attention.gates(variables, inputs)"
    )
  known = " and ".join(reads) or "none"
  return (
    f"{option}: {name} attention has no such gate; it has {known}, which "
    "its record's gates(variables, inputs) gives"
  )


def _visible(
  options: _Options, query: Array, key: Array
) -> tuple[Array | None, Array | None]:
  """The key mask of a call, and where the two segment ids of a position agree.

  Query and key are one sequence, so a position whose two ids differ is in neither
  segment: it is hidden, and it sees nothing.
  """
  queries, keys = options.query_segment_ids, options.key_segment_ids
  arguments.check_segment_ids(queries, keys, query, key)
  keep = arguments.key_mask(
    options.mask, query, key, "dense attention takes masks that vary"
  )
  if queries is None or keys is None or queries.shape != keys.shape:
    return (None if keep is None else keep[:, None, None, :]), None
  same = queries == keys
  keep = same if keep is None else keep & same
  return keep[:, None, None, :], same
