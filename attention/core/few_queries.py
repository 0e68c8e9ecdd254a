"""Softmax attention of a few queries to keys in parts, one part a device.

Every device has the same queries and its own keys. What a part gives, (out_r,
lse_r), is joined over the devices by one maximum and one sum:

    m = max_r lse_r        out = Σ_r e^(lse_r − m) out_r / Σ_r e^(lse_r − m)

Landmarks, global tokens and global blocks are such queries.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention.core import loop


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(
  source: loop.Source,
  axis_name: str,
  query: Float[Array, "B T N H"],
  arrays: Any,
  parameters: Any,
  fixed: Any,
) -> Float[Array, "B T N V"]:
  """`loop.attend` of queries that all devices have, on the keys of all.

  Args:
    source: of the queries and this device's keys, see `loop.Source`.
    axis_name: of the devices, inside `jax.shard_map`.
    query: the same on every device.
    arrays: this device's keys and values.
    parameters: of the score, the same on every device.
    fixed: what has no derivative.

  Returns:
    The same on every device, in the dtype of `query`. What crosses: two sums of
    T·N·V numbers over the devices, one of them in the backward. Gradients of
    `query` are this device's share: those of its keys.
  """
  return _forward(source, axis_name, query, arrays, parameters, fixed)[0]


def _forward(source, axis_name, query, arrays, parameters, fixed):
  out, lse = loop.forward(source, query, arrays, parameters, fixed)
  # +∞ is what the loop gives a row without keys.
  lse = jnp.where(jnp.isinf(lse), -jnp.inf, lse)
  largest = jax.lax.pmax(lse, axis_name)
  largest = jnp.where(largest == -jnp.inf, 0.0, largest)
  share = jnp.exp(lse - largest)
  sums = jnp.concatenate([share * out.astype(jnp.float32), share], axis=-1)
  sums = jax.lax.psum(sums, axis_name)
  total = sums[..., -1:]
  sees_none = total == 0.0
  total = jnp.where(sees_none, 1.0, total)
  lse = jnp.where(sees_none, jnp.inf, largest + jnp.log(total))
  return (sums[..., :-1] / total).astype(query.dtype), lse


def _attend_fwd(source, axis_name, query, arrays, parameters, fixed):
  out, lse = _forward(source, axis_name, query, arrays, parameters, fixed)
  return out, (query, arrays, parameters, fixed, out, lse)


def _attend_bwd(source, axis_name, residuals, cotangent):
  query, arrays, parameters, fixed, out, lse = residuals
  # Each device goes on with a copy of the result.
  cotangent = jax.lax.psum(cotangent, axis_name)
  found = loop.backward(
    source, query, arrays, parameters, fixed, out, lse, cotangent
  )
  return *found, None


attend.defvjp(_attend_fwd, _attend_bwd)
