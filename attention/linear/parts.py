"""Linear attention of a sequence in parts, one a device: the states are joined.

Each of D devices makes the state of its own keys. Both ways, all devices need the
state of all keys,

    c_m = max_r c_m^r        U_m = Σ_r e^(c_m^r − c_m) U_m^r    (Z alike)

one maximum and one sum over the devices. In a causal call, device r begins with the
state of the devices before it: log₂ D steps of a scan, in which each device sends
its state to one that is 1, 2, 4, … places on, and one more step to the next. What
crosses is a state of K·M·(V+1) numbers a step, at any length.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention.core import device_scan
from attention.linear import bidirectional, causal
from attention.linear.features import FeatureMap, Operands
from attention.linear.state import EMPTY, LinearState


def attend(
  features: FeatureMap,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  *,
  is_causal: bool,
  axis_name: str,
) -> Float[Array, "B T N V"]:
  """`kernel.attend` of the whole, of which each device has a part.

  Args:
    features: the feature map.
    operands: this device's query, key and value, and the map's arrays.
    keep: which of its keys count; None is all.
    is_causal: query t sees keys s ≤ t of the whole.
    axis_name: of the devices, inside `jax.shard_map`.

  Returns:
    `[B, T, N, V]`, this device's part of the result.

  Raises:
    ValueError: a causal call with another length of keys.
  """
  query, key, value, parameters = operands
  if is_causal and query.shape[1] != key.shape[1]:
    raise ValueError(
      "is_causal: expected parts of one length, got "
      f"{query.shape[1]} queries and {key.shape[1]} keys on a device"
    )
  if is_causal:
    before = state_before(features, operands, keep, axis_name)
    return causal.attend(features, operands, keep, None, before)
  own = bidirectional.total(features, key, value, parameters, keep, None)
  return bidirectional.read(
    features, query, parameters, _of_all(own, axis_name), None
  )


def state_before(
  features: FeatureMap,
  operands: Operands,
  keep: Bool[Array, "B S"] | None,
  axis_name: str,
) -> LinearState | None:
  """The state of the keys of all devices before this one; None on one device."""
  if jax.lax.axis_size(axis_name) == 1:
    return None
  _, key, value, parameters = operands
  own = bidirectional.total(features, key, value, parameters, keep, None)
  nothing = jax.tree.map(jnp.zeros_like, own)
  if own.log_scale is not None:
    nothing = nothing._replace(log_scale=jnp.full_like(own.log_scale, EMPTY))
  return device_scan.before(own, _joined, nothing, axis_name)


def _of_all(own: LinearState, axis_name: str) -> LinearState:
  """The state of the keys of all devices."""
  if own.log_scale is None:
    return LinearState(None, jax.lax.psum(own.sums, axis_name))
  own_scale = jax.lax.stop_gradient(own.log_scale)
  scale = jax.lax.pmax(own_scale, axis_name)
  sums = jax.lax.psum(own.sums * jnp.exp(own_scale - scale), axis_name)
  return LinearState(scale, sums)


def _joined(earlier: LinearState, later: LinearState) -> LinearState:
  """The state of the keys of both."""
  first, last = earlier.log_scale, later.log_scale
  if first is None or last is None:
    return LinearState(None, earlier.sums + later.sums)
  first, last = jax.lax.stop_gradient((first, last))
  scale = jnp.maximum(first, last)
  return LinearState(
    scale,
    earlier.sums * jnp.exp(first - scale) + later.sums * jnp.exp(last - scale),
  )
