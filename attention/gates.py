"""What recurrences read from their inputs, and the record of such a mechanism."""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import arguments, plug
from attention.recurrence import recurrent_attention

Params = Mapping[str, Array]
Gate = Callable[[Params, Array], Array]
"""`(params, inputs [B, T, F]) -> [B, T, …]`."""


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

  def reading(function, has_cache=False):
    """A function of the record that is given gates."""

    def call(variables, *args, **options):
      cache, (query, key, value, *others) = args[:has_cache], args[has_cache:]
      arguments.check_qkv(query, key, key if value is None else value)
      given = gates(variables, key.reshape(*key.shape[:2], -1))
      key = None if makes_keys else key
      options = {**given, **options}
      return function(variables, *cache, query, key, value, *others, **options)

    return function and call

  return mechanism._replace(
    apply=reading(mechanism.apply),
    decode=reading(mechanism.decode, has_cache=True),
    prefill=reading(mechanism.prefill, has_cache=True),
    apply_sharded=reading(mechanism.apply_sharded),
    gates=None,
  )


def unit_length(x: Float[Array, "*A H"]) -> Float[Array, "*A H"]:
  """X / √(Σ x² + 10⁻⁶) along the last axis, in float32."""
  x = x.astype(jnp.float32)
  squares = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(squares + 1e-6)


def kernel(key: Array, *shape: int) -> Float[Array, "..."]:
  """A matrix from the first axis to the others, N(0, 1/F)."""
  return jax.random.normal(key, shape) / math.sqrt(shape[0])


def project(inputs: Float[Array, "B T F"], *weights: Array) -> Array:
  """Inputs · weights · …, in float32."""
  inputs = inputs.astype(jnp.float32)
  return functools.reduce(lambda x, w: jnp.tensordot(x, w, 1), weights, inputs)


def rates(key: Array, num_heads: int) -> Float[Array, "N"]:
  """A of each head, where e^A is uniform between 1 and 16, as in Mamba-2."""
  return jnp.log(jax.random.uniform(key, (num_heads,), minval=1.0, maxval=16.0))


def step_bias(key: Array, *shape: int) -> Float[Array, "..."]:
  """B where softplus(b) = Δ is 0.001 to 0.1, uniform in its logarithm."""
  low, high = math.log(0.001), math.log(0.1)
  step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
  return step + jnp.log(-jnp.expm1(-step))


def step_params(
  keys: Sequence[Array] | Array, dims: plug.Dims
) -> dict[str, Array]:
  """What `step` and `step_decay` read, of three random keys."""
  heads = dims.num_heads
  return {
    "step_kernel": kernel(keys[0], dims.features, heads),
    "step_bias": step_bias(keys[1], heads),
    "log_rate": rates(keys[2], heads),
  }


def step(
  params: Params, inputs: Float[Array, "B T F"]
) -> Float[Array, "B T N"]:
  """Δ = softplus(x · W + b) of each head."""
  steps = project(inputs, params["step_kernel"])
  return jax.nn.softplus(steps + params["step_bias"][None, None])


def step_decay(
  params: Params, inputs: Float[Array, "B T F"]
) -> Float[Array, "B T N"]:
  """The logarithm −Δ e^A of each head's decay."""
  return -step(params, inputs) * jnp.exp(params["log_rate"])[None, None]


_ONE_SEQUENCE = {
  "query": Float[Array, "B T N H"],
  "key": Float[Array, "B T K H"],
  "value": Float[Array, "B T K V"],
}


def recurrent_mechanism(
  name: str,
  recurrence: Callable[..., tuple[Array, Array]] | None = None,
  *,
  init: Callable[[Array, plug.Dims], Params] | None = None,
  gates: Mapping[str, Gate] = types.MappingProxyType({}),
) -> plug.Attention:
  """The record of a recurrence with its own decays and rates.

  Args:
    name: of the mechanism, for messages.
    recurrence: `(params, query, key, value, **options) -> (out, state)`, with 0 for
      hidden values; gates are among the options. None is `recurrent_attention`.
    init: `(key, dims) -> params`, of a mechanism with gates.
    gates: option -> what it is read with.

  Returns:
    An `Attention` whose cache is the state `[B, N, H, V]` of each example.
  """

  def make(key, dims):
    if init is None:
      return {}
    if dims.features < 1:
      raise ValueError(
        f"features: {name} reads gates from inputs of Dims.features numbers; "
        f"expected at least 1, got {dims.features}"
      )
    return {"params": init(key, dims)}

  def run(variables, query, key, value, state=None, axis_name=None, **call):
    arrays = {"query": query, "key": key, "value": value}
    arguments.check_call(arrays, _ONE_SEQUENCE, needed=arrays)
    given = {gate: call.pop(gate, None) for gate in gates}
    for gate, array in given.items():
      if array is None:
        raise ValueError(
          f"{gate}: {name} attention reads it from what queries are projected "
          "from, got none; give the call **attention.gates(variables, inputs)"
        )
    call = arguments.accepted_options(name, _options, call)
    options, same = _options(query, key, **call)
    if options["mask"] is not None:
      value = jnp.where(options["mask"][:, 0, 0, :, None, None], value, 0)
    attend = recurrent_attention
    if recurrence is not None:
      attend = functools.partial(recurrence, variables.get("params", {}))
    options |= {**given, "initial_state": state, "axis_name": axis_name}
    out, state = attend(query, key, value, **options)
    if same is not None:
      out = jnp.where(same[..., None, None], out, 0.0)
    return out.astype(query.dtype), state

  def apply(variables, query, key, value, **call):
    return run(variables, query, key, value, **call)[0]

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables, max_length, dtype
    shape = (batch, dims.num_heads, dims.head_dim, dims.values)
    return jnp.zeros(shape, jnp.float32)

  def decode(variables, state, query, key, value, **call):
    call["is_causal"] = True
    return run(variables, query, key, value, state, **call)

  def prefill(variables, state, query, key, value, lengths, **call):
    is_read = jnp.arange(query.shape[1])[None, :] < lengths[:, None]
    call["mask"] = is_read[:, None, None, :]
    return decode(variables, state, query, key, value, **call)[1]

  def read(variables, inputs):
    params = variables["params"]
    return {gate: function(params, inputs) for gate, function in gates.items()}

  return plug.Attention(
    init=make,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    apply_sharded=apply,
    supports=frozenset({"causal", "mask", "segments", "decode", "sequence"}),
    cost="linear",
    causal_only=True,
    gates=read if gates else None,
  )


def _options(
  query,
  key,
  *,
  mask=None,
  is_causal=False,
  scale=None,
  query_segment_ids=None,
  key_segment_ids=None,
) -> tuple[dict[str, Any], Array | None]:
  """Options of a recurrence, and where the two segment ids of a position agree.

  Query and key are one sequence, so a position whose two ids differ is in neither
  segment: it is hidden, and it sees nothing.
  """
  ids = {
    "query_segment_ids": query_segment_ids,
    "key_segment_ids": key_segment_ids,
  }
  arguments.check_call({"query": query, "key": key, **ids})
  keep = arguments.key_mask(
    mask, query, key, "dense attention takes masks that vary"
  )
  same = None
  if key_segment_ids is not None and query.shape[1] == key.shape[1]:
    same = query_segment_ids == key_segment_ids
    keep = same if keep is None else keep & same
  options = {
    "mask": None if keep is None else keep[:, None, None, :],
    "is_causal": is_causal,
    "scale": scale,
    "segment_ids": key_segment_ids,
  }
  return options, same
