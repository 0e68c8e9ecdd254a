"""Gates of recurrences, and mechanisms that are recurrences."""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attention import checks
from attention.mechanism import (
  Attention,
  Cache,
  Dims,
  Variables,
  accepted_options,
)
from attention.names import unknown_option
from attention.platform.layout import zero_masked
from attention.platform.programs import call_with_auto_axes, promote
from attention.recurrent.recurrence import recurrent_attention

Params = Mapping[str, Array]
Gate = Callable[[Params, Array], Array]
"""`(params, inputs [B, T, F]) -> [B, T, …]`."""


def gates_from_keys(mechanism: Attention) -> Attention:
  """Returns a mechanism that computes its gates from its keys.

  This is for callers that have queries, keys and values but not the inputs from which
  they are projected, such as benchmarks. F of its `Dims` is K·H. A mechanism without
  gates is returned unchanged. A mechanism that computes its own keys ('own_keys')
  computes them from the given keys.
  """
  gates = mechanism.gates
  if gates is None:
    return mechanism
  has_own_keys = "own_keys" in mechanism.supports

  def key_gates(variables, key):
    return gates(variables, key.reshape(*key.shape[:2], -1))

  def with_gates(function, has_cache=False):
    """Wraps a function of the mechanism to compute its gates."""

    def call(variables, *args, **options):
      cache, (query, key, value, *others) = args[:has_cache], args[has_cache:]
      checks.check_qkv(query, key, key if value is None else value)
      computed = call_with_auto_axes(key_gates, key, (variables, key), {})
      key = None if has_own_keys else key
      options = {**computed, **options}
      return function(variables, *cache, query, key, value, *others, **options)

    return function and call

  return mechanism._replace(
    apply=with_gates(mechanism.apply),
    decode=with_gates(mechanism.decode, has_cache=True),
    prefill=with_gates(mechanism.prefill, has_cache=True),
    gates=None,
  )


def kernel(key: Array, *shape: int) -> Float[Array, "..."]:
  """Draws a matrix from N(0, 1/F), with F the size of the first axis."""
  return jax.random.normal(key, shape) / math.sqrt(shape[0])


def _float32_params(variables: Variables) -> Params:
  """The parameters in float32, the dtype of recurrences."""
  params = variables.get("params", {})
  return jax.tree.map(lambda x: x.astype(jnp.float32), params)


def rms_norm(x: Float[Array, "*A H"], epsilon: float) -> Float[Array, "*A H"]:
  """Returns x / √(mean of x² + ε), with the mean over the last axis."""
  square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(square + epsilon)


def project(inputs: Float[Array, "B T F"], *weights: Array) -> Array:
  """Multiplies inputs by one weight after another, in float32."""
  x = inputs.astype(jnp.float32)
  for weight in weights:
    product = x @ weight.reshape(weight.shape[0], -1)
    x = product.reshape(*x.shape[:-1], *weight.shape[1:])
  return x


def step_params(
  keys: Sequence[Array] | Array, dims: Dims, rank: int | None = None
) -> dict[str, Array]:
  """Draws the parameters of `step_decay`.

  softplus(b) = Δ is log-uniform from 0.001 to 0.1, and e^A is uniform from 1 to 16, as
  in Mamba-2.

  Args:
    keys: random keys of each matrix, of b and of A: three, or four with a rank.
    dims: sizes of the mechanism.
    rank: R of W₁ `[F, R]` and W₂ `[R, N, H]`; None means one W `[F, N]`.
  """
  *keys, bias_key, rate_key = keys
  heads = dims.num_heads, dims.head_dim
  if rank is None:
    heads = heads[:1]
    kernels = {"step_kernel": kernel(keys[0], dims.features, *heads)}
  else:
    kernels = {
      "step_down": kernel(keys[0], dims.features, rank),
      "step_up": kernel(keys[1], rank, *heads),
    }
  rates = jax.random.uniform(rate_key, heads[:1], minval=1.0, maxval=16.0)
  bias = step_bias(bias_key, heads)
  return {**kernels, "step_bias": bias, "log_rate": jnp.log(rates)}


def step_bias(key: Array, shape: tuple[int, ...]) -> Float[Array, "*A"]:
  """Draws b such that softplus(b) = Δ is log-uniform from 0.001 to 0.1."""
  low, high = math.log(0.001), math.log(0.1)
  step = jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high))
  return step + jnp.log(-jnp.expm1(-step))


def step(params: Params, inputs: Float[Array, "B T F"]) -> Array:
  """Step sizes Δ = softplus(x · W + b) per head, or with W₁ · W₂ per channel."""
  return jax.nn.softplus(_step_logits(params, inputs))


def _step_logits(params, inputs):
  """The logits x · W + b per head, or with W₁ · W₂ per channel."""
  kernels = "step_kernel", "step_down", "step_up"
  kernels = [params[name] for name in kernels if name in params]
  return project(inputs, *kernels) + params["step_bias"][None, None]


def step_decay(params: Params, inputs: Float[Array, "B T F"]) -> Array:
  """The log decays −Δ e^A per head or channel, with one A per head."""
  steps = step(params, inputs)
  return -steps * _rates(params, steps)


def bounded_decay(lower_bound: float) -> Gate:
  """The log decays L · sigmoid(e^A (x · W + b)), between the bound L < 0 and 0.

  Raises:
    ValueError: `lower_bound` is not below 0.
  """
  if not lower_bound < 0.0:
    raise ValueError(f"lower_bound: expected below 0, got {lower_bound!r}")

  def decay(params, inputs):
    logits = _step_logits(params, inputs)
    return lower_bound * jax.nn.sigmoid(logits * _rates(params, logits))

  return decay


def _rates(params, steps):
  """The rate e^A of each head, broadcastable to steps per head or per channel."""
  rate = jnp.exp(params["log_rate"])
  return rate.reshape(1, 1, -1, *[1] * (steps.ndim - 3))


def check_gates(name: str, call: Mapping[str, Any], *options: str) -> None:
  """Raises ValueError if a call lacks an array that the mechanism's `gates` returns."""
  for option in options:
    if call.get(option) is None:
      raise ValueError(
        f"{option}: expected the gate that {name} attention computes from the "
        "inputs of the layer, got None; pass **attention.gates(variables, inputs)"
      )


def check_rate(max_rate: float) -> None:
  """Raises ValueError unless `max_rate` is above 0 and at most 2."""
  if not 0.0 < max_rate <= 2.0:
    # States grow if β is larger, even with keys of unit length.
    raise ValueError(
      f"max_rate: expected above 0 and at most 2, got {max_rate!r}"
    )


def rate(max_rate: float) -> Gate:
  """The gate β = max_rate · sigmoid(x · W), with W the parameter `rate_kernel`.

  Raises:
    ValueError: as in `check_rate`.
  """
  check_rate(max_rate)

  def beta(params, inputs):
    rates = project(inputs, params["rate_kernel"])
    return max_rate * jax.nn.sigmoid(rates)

  return beta


def affine_gate(name: str, activation: Callable[[Array], Array]) -> Gate:
  """The gate activation(x · W + b), with parameters `{name}_kernel` and `{name}_bias`."""

  def gate(params, inputs):
    x = project(inputs, params[f"{name}_kernel"])
    return activation(x + params[f"{name}_bias"][None, None])

  return gate


_ARRAYS = {
  **checks.ARRAYS,
  "query": Float[Array, "B T Q H"],
  "key": Float[Array, "B T K H"],
  "value": Float[Array, "B T U V"],
  "key_segment_ids": Int[Array, "B T"],
  "log_decay": Float[Array, "..."],
  "beta": Float[Array, "B T N"],
  "initial_state": Float[Array, "B N H V"],
}
"""Queries and keys have the same length, and values may have more heads."""


def recurrent_mechanism(
  name: str,
  recurrence: Callable[..., tuple[Array, Cache]] = (
    lambda params, *qkv, **options: recurrent_attention(*qkv, **options)
  ),
  *,
  implementation: str | None = None,
  init: Callable[[Array, Dims], Params] | None = None,
  gates: Mapping[str, Gate] = types.MappingProxyType({}),
  arrays: Mapping[str, Any] = types.MappingProxyType({}),
  init_state: Callable[[int, Dims], Cache] | None = None,
  is_sharded: bool = True,
) -> Attention:
  """Returns the mechanism of a recurrence.

  Args:
    name: name of the mechanism, for messages.
    recurrence: `(params, query, key, value, **options) -> (out, state)`. Gates are
      options; all arrays have N heads, and keys, values and gates of masked positions
      are 0.
    implementation: the recurrence's option of this name, for whole sequences; None if
      it has no such option.
    init: `(key, dims) -> params`, required if there are gates.
    gates: maps options to functions `(params, inputs)` that compute them.
    arrays: annotations of gates other than `log_decay` and `beta`.
    init_state: `(batch, dims) -> state`; None means zeros `[B, N, H, V]`.
    is_sharded: whether the recurrence takes an `axis_name`, for a sharded sequence.

  Returns:
    An `Attention` whose cache is the state of each example.
  """
  sequence_recurrence = recurrence
  if implementation is not None:
    sequence_recurrence = functools.partial(
      recurrence, implementation=implementation
    )

  def init_variables(key, dims):
    if init is None:
      return {}
    if gates:
      checks.check_features(name, dims.features)
    return {"params": init(key, dims)}

  def run(
    recurrence, variables, query, key, value, state, /, axis_name=None, **call
  ):
    gate_arrays = {gate: call.pop(gate, None) for gate in gates}
    call = accepted_options(name, _attend, call)
    if axis_name is not None and not is_sharded:
      known = set(call) | {"mask", "is_causal", "scale"}
      raise ValueError(unknown_option("axis_name", name, sorted(known)))
    arguments = {"query": query, "key": key, "value": value, **gate_arrays}
    arguments |= {**call, "axis_name": axis_name}
    if init_state is None:
      arguments["initial_state"] = state
    needed = "query", "key", "value"
    checks.check_call(arguments, {**_ARRAYS, **arrays}, needed=needed)
    check_gates(name, gate_arrays, *gates)
    params, qkv = _float32_params(variables), promote(query, key, value)
    out, state = call_with_auto_axes(
      functools.partial(_attend, recurrence),
      query,
      (params, *qkv, gate_arrays, state),
      {**call, "axis_name": axis_name},
    )
    return out.astype(query.dtype), state

  def apply(variables, query, key, value, **call):
    qkv = query, key, value
    return run(sequence_recurrence, variables, *qkv, None, **call)[0]

  def init_cache(variables, batch, max_length, dims, dtype):
    del variables, max_length, dtype
    if init_state is not None:
      return init_state(batch, dims)
    shape = (batch, dims.num_heads, dims.head_dim, dims.values)
    return jnp.zeros(shape, jnp.float32)

  def decode(variables, state, query, key, value, **call):
    qkv = query, key, value
    return run(recurrence, variables, *qkv, state, is_causal=True, **call)

  def prefill(variables, state, query, key, value, lengths, **call):
    keep = jnp.arange(query.shape[1])[None, :] < lengths[:, None]
    arrays = variables, query, key, value, state
    options = {"mask": keep[:, None, None, :], "is_causal": True}
    _, state = run(sequence_recurrence, *arrays, **options, **call)
    return state

  def compute_gates(variables, inputs):
    params = _float32_params(variables)
    # One cast for all gates: devices along 'tensor' would sum the gradient of each cast.
    inputs = inputs.astype(jnp.float32)
    return {gate: function(params, inputs) for gate, function in gates.items()}

  return Attention(
    init=init_variables,
    apply=apply,
    init_cache=init_cache,
    decode=decode,
    prefill=prefill,
    supports=frozenset(
      {"causal", "mask", "segments", "value_heads", "decode"}
      | ({"sequence"} if is_sharded else set())
    ),
    cost="linear",
    causal_only=True,
    gates=compute_gates if gates else None,
  )


def query_only(name: str, mechanism: Attention) -> Attention:
  """Wraps a recurrence that computes its keys, and by default its values, from queries.

  The recurrence receives the query, with zeros at masked positions, as its key and, if
  a call has no value, also as its value.

  Returns:
    The mechanism with 'shared_qk' and 'own_keys', whose functions expect None as the
    key.
  """

  def with_query(function, has_cache=False):
    """Wraps a function of the mechanism to use the query as its key."""

    def call(variables, *args, **options):
      cache, (query, key, value, *others) = args[:has_cache], args[has_cache:]
      if key is not None:
        raise ValueError(
          f"key: expected None, as {name} computes it from the query, got an array"
        )
      value = query if value is None else value
      qkv = query, query, value
      return function(variables, *cache, *qkv, *others, **options)

    return function and call

  return mechanism._replace(
    apply=with_query(mechanism.apply),
    decode=with_query(mechanism.decode, has_cache=True),
    prefill=with_query(mechanism.prefill, has_cache=True),
    supports=mechanism.supports - {"value_heads"} | {"shared_qk", "own_keys"},
  )


def gate_per_channel(
  gate: Float[Array, "... H"], value: Float[Array, "... V"]
) -> Float[Array, "... V"]:
  """The gate of each channel of a value.

  All channels of a value of another width, such as the identity matrix of
  `attention_weights`, get the mean.
  """
  if gate.shape[-1] == value.shape[-1]:
    return gate
  mean = jnp.mean(gate, axis=-1, keepdims=True)
  return jnp.broadcast_to(mean, (*gate.shape[:-1], value.shape[-1]))


def _attend(
  recurrence,
  params,
  query,
  key,
  value,
  gates,
  state,
  /,
  *,
  axis_name=None,
  mask=None,
  is_causal=False,
  scale=None,
  query_segment_ids=None,
  key_segment_ids=None,
):
  """The results and the state of a recurrence.

  Queries and keys are one sequence, so a position with different query and key segment
  ids is in no segment: it is masked, and its result is 0.
  """
  num_heads = max(x.shape[2] for x in (query, key, value))
  query, key, value = (
    jnp.repeat(x, num_heads // x.shape[2], axis=2) for x in (query, key, value)
  )
  keep = checks.key_mask(mask, query, key)
  in_segment = None
  if key_segment_ids is not None:
    in_segment = query_segment_ids == key_segment_ids
    keep = in_segment if keep is None else keep & in_segment
  if keep is not None:
    mask = keep[:, None, None, :]
    key, value, gates = jax.tree.map(
      lambda x: zero_masked(x, keep), (key, value, gates)
    )
  out, state = recurrence(
    params,
    query,
    key,
    value,
    mask=mask,
    is_causal=is_causal,
    scale=scale,
    segment_ids=key_segment_ids,
    initial_state=state,
    axis_name=axis_name,
    **gates,
  )
  if in_segment is not None:
    out = jnp.where(in_segment[..., None, None], out, 0.0)
  return out.astype(query.dtype), state
