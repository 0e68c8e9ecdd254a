"""What recurrences read from their inputs, and the record of such a mechanism."""

from collections.abc import Callable, Mapping
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import arguments, plug
from attention.recurrence import recurrent_attention

Params = Mapping[str, Array]
Gates = Mapping[str, Array]

_NAMES = ("log_decay", "beta")
"""Options of a call that are gates."""


def gates_from_keys(mechanism: plug.Attention) -> plug.Attention:
  """A mechanism whose gates are read from its keys.

  For callers that have queries, keys and values and nothing that they are
  projected from: benchmarks, pictures, the contract. F of its `Dims` is K·H. A
  mechanism without gates is returned as it is. One that makes its own keys
  ('own_keys') makes them from the keys.
  """
  gates = mechanism.gates
  if gates is None:
    return mechanism
  makes_keys = "own_keys" in mechanism.supports

  def read(variables, key, call):
    """The key that the mechanism is given, and its options."""
    given = gates(variables, key.reshape(*key.shape[:2], -1))
    return None if makes_keys else key, {**given, **call}

  def apply(variables, query, key, value, **call):
    arguments.check_qkv(query, key, key if value is None else value)
    key, call = read(variables, key, call)
    return mechanism.apply(variables, query, key, value, **call)

  def after_cache(function):
    def call(variables, cache, query, key, *rest, **call):
      key, call = read(variables, key, call)
      return function(variables, cache, query, key, *rest, **call)

    return function and call

  def apply_sharded(variables, query, key, value, **call):
    assert mechanism.apply_sharded is not None
    key, call = read(variables, key, call)
    return mechanism.apply_sharded(variables, query, key, value, **call)

  return mechanism._replace(
    apply=apply,
    decode=after_cache(mechanism.decode),
    prefill=after_cache(mechanism.prefill),
    apply_sharded=mechanism.apply_sharded and apply_sharded,
    gates=None,
  )


def unit_length(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
  """X / √(Σ x² + 10⁻⁶) along the last axis, in float32."""
  x = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(squares + 1e-6)


def width(name: str, dims: plug.Dims) -> int:
  """F, the width of the inputs.

  Raises:
    ValueError: it is not known.
  """
  if dims.features < 1:
    raise ValueError(
      f"features: {name} reads gates from inputs of Dims.features numbers; "
      f"expected at least 1, got {dims.features}"
    )
  return dims.features


def kernel(key: Array, *shape: int) -> Float[Array, "..."]:
  """A matrix from the first axis to the others, N(0, 1/F)."""
  return jax.random.normal(key, shape) / math.sqrt(shape[0])


def project(
  inputs: Float[Array, "B T F"], weights: Float[Array, "F *A"]
) -> Float[Array, "B T *A"]:
  """Inputs · weights, in float32."""
  return jnp.tensordot(inputs.astype(jnp.float32), weights, axes=1)


def rates(key: Array, num_heads: int) -> Float[Array, "N"]:
  """A of each head, where e^A is uniform between 1 and 16, as in Mamba-2."""
  return jnp.log(jax.random.uniform(key, (num_heads,), minval=1.0, maxval=16.0))


def step_bias(key: Array, *shape: int) -> Float[Array, "..."]:
  """B where softplus(b) = Δ is 0.001 to 0.1, uniform in its logarithm."""
  low, high = math.log(0.001), math.log(0.1)
  step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
  return step + jnp.log(-jnp.expm1(-step))


def steps(
  params: Params, inputs: Float[Array, "B T F"]
) -> tuple[Float[Array, "B T N"], Float[Array, "B T N"]]:
  """Δ = softplus(x · W + b) of each head, and the logarithm −Δ e^A of its decay."""
  step = project(inputs, params["step_kernel"])
  step = jax.nn.softplus(step + params["step_bias"][None, None])
  return step, -step * jnp.exp(params["log_rate"])[None, None]


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


def recurrent_mechanism(
  name: str,
  operands: Callable[[Params, Array, Array, Array, Gates], Operands],
  *,
  init: Callable[[Array, plug.Dims], plug.Variables] = plug.no_variables,
  gates: Callable[[Params, Array], dict[str, Array]] | None = None,
  reads: tuple[str, ...] = (),
  skip: Callable[[Params, Array, Array], Array] | None = None,
  scale: float | None = None,
) -> plug.Attention:
  """The record of a recurrence with its own decays and rates.

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

  def run(variables, query, key, value, state, axis_name, call):
    call = arguments.accepted_options(name, _call, call)
    options, given = _call(**call), {}
    for option in _NAMES:
      gate = call.get(option)
      if (gate is not None) != (option in reads):
        raise ValueError(_unread(name, option, reads))
      if gate is not None:
        given[option] = gate
    arguments.check_qkv(query, key, value)
    mask, same = _visible(options, query, key)
    if mask is not None:
      value = jnp.where(mask[:, 0, 0, :, None, None], value, 0)
    params = variables.get("params", {})
    out, state = recurrent_attention(
      name,
      *operands(params, query, key, value, given),
      mask=mask,
      is_causal=options.is_causal,
      scale=scale if options.scale is None else options.scale,
      initial_state=state,
      segment_ids=options.key_segment_ids,
      axis_name=axis_name,
    )
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
