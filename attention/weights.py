"""The effective attention matrix of any mechanism."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
import numpy as np

from attention.mechanism import Attention


def attention_weights(
  fn: Callable[..., Any],
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"] | None,
  value: Float[Array, "B S K V"] | None = None,
  **options: Any,
) -> Float[Array, "B N T S"]:
  """Returns the matrix A with `fn(query, key, value) = A · value` for every value.

  Nearly every attention function is linear in `value`, so A is its output for the
  identity: column s has the weights of key s. The rows of a normalised mechanism sum to
  1, or to 0 for a query that sees no key. For a function that is not linear, A is the
  derivative at the given values: A_ts is the mean of ∂out_tc/∂v_sc over the channels c.

  Args:
    fn: an attention function, `fn(query, key, value, **options)`.
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; None for an `Attention.apply` whose query is also its key
      ('shared_qk') or that computes its own keys ('own_keys').
    value: the values at which to differentiate a function that is not linear in them,
      such as `ttt_linear_attention`, that has an `initial_state`, or whose values have
      more heads than its keys; None for all others.
    **options: passed to `fn`. The identity also replaces the values of `global_qkv`, so
      A assumes that both are the same.

  Returns:
    `[B, N, T, S]` in the dtype of `query`.

  Raises:
    ValueError: `fn` is not a function, or does not return one array; an array has
      another rank; or there is an `initial_state` without values.

  Cost: one call of `fn` with values of width S, so at least B·N·T·S memory for any
  `fn`; with `value` S·V derivatives. It is meant for plots and tests.
  """
  if isinstance(fn, Attention) or not callable(fn):
    raise ValueError(
      f"fn: expected an attention function, got {type(fn).__name__}; for a mechanism "
      "give functools.partial(mechanism.apply, variables)"
    )
  for name, x in (("query", query), ("key", key), ("value", value)):
    if x is not None and np.ndim(x) != 4:
      raise ValueError(
        f"{name}: expected 4 axes [B, length, heads, width], got shape {np.shape(x)}"
      )
  if value is not None:
    return _derivative(
      lambda x: _one_array(fn(query, key, x, **options)), jnp.asarray(value)
    )
  if options.get("initial_state") is not None:
    raise ValueError(
      "value: expected the values of the call, as initial_state has their width and "
      "adds to the result, got None"
    )
  query = jnp.asarray(query)
  batch, source_length, num_kv_heads, _ = np.shape(
    query if key is None else key
  )
  identity = jnp.broadcast_to(
    jnp.eye(source_length, dtype=query.dtype)[None, :, None, :],
    (batch, source_length, num_kv_heads, source_length),
  )
  if options.get("global_qkv") is not None:
    options["global_qkv"] = (*options["global_qkv"][:2], identity)
  try:
    out = fn(query, key, identity, **options)
  except ValueError as error:
    error.add_note(
      f"attention_weights gave values of the key's {num_kv_heads} heads and of width "
      f"{source_length}; with the option value, it gives those values."
    )
    raise
  return jnp.moveaxis(_one_array(out), 2, 1)


def _one_array(out: Any) -> Array:
  """Raises ValueError if a function returns more than one array."""
  if not hasattr(out, "shape"):
    raise ValueError(
      f"fn: expected one array as its result, got a {type(out).__name__}; leave out "
      "options such as return_lse and return_state"
    )
  return out


def _derivative(fn, value):
  """The mean over c of ∂out_tc/∂v_sc, `[B, N, T, S]`, one key s at a time."""

  def channel_derivative(s, c):
    tangent = jnp.zeros_like(value).at[:, s, :, c].set(1.0)
    return jax.jvp(fn, [value], [tangent])[1][..., c]

  def key_weights(s):
    channels = jnp.arange(value.shape[3])
    return jax.vmap(channel_derivative, (None, 0))(s, channels).mean(axis=0)

  weights = jax.lax.map(key_weights, jnp.arange(value.shape[1]))
  return weights.transpose(1, 3, 2, 0)
