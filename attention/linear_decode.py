"""The decode cache of linear attention: one state, whatever the length."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attention import linear_state, plug
from attention.blocks import heads_last
from attention.linear_blocks import to_rows
from attention.linear_state import LinearState


def empty_cache(
  batch: int, dims: plug.Dims, num_features: int, is_log: bool
) -> LinearState:
  """A state that has seen nothing: B·K·M·(V+1) float32 numbers, V = H."""
  return linear_state.empty_state(
    (batch, dims.num_kv_heads), num_features, dims.head_dim, is_log
  )


def step(
  cache: LinearState,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
  features: Callable[[Array], Array],
) -> tuple[Float[Array, "B 1 N V"], LinearState]:
  """One position: M·(H+V) operations a head whatever the position.

  `features` makes what the state holds, φ or log φ.
  """
  num_kv_heads = key.shape[2]
  query_rows, key_rows, value_rows = (
    to_rows(x, num_kv_heads) for x in (query, key, value)
  )
  state = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), cache)
  key_features = features(key_rows).astype(jnp.float32)
  state = linear_state.absorb(state, key_features, value_rows, None)
  query_features = features(query_rows).astype(jnp.float32)
  out, _ = linear_state.finish(*linear_state.read(state, query_features))
  out = heads_last(out, query.shape[0], 1).astype(query.dtype)
  cache = jax.tree.map(lambda x, old: x.reshape(old.shape), state, cache)
  return out, cache
