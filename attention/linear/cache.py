"""The decode cache of linear attention: one state of constant size."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attention import plug
from attention.core.layout import heads_first, heads_last
from attention.linear import state
from attention.linear.features import FeatureMap
from attention.linear.state import LinearState


def init_cache(
  batch: int, dims: plug.Dims, num_features: int, is_log: bool
) -> LinearState:
  """The state before the first key.

  Its sums are float32 for activations of any dtype, because they run over a
  whole sequence. It has B·K·M·(V+1) numbers with V = H, and B·K·M more for
  features that are logarithms.
  """
  return state.empty(
    batch, dims.num_kv_heads, num_features, dims.values, is_log
  )


def prefill(
  features: FeatureMap,
  parameters: tuple[Array, ...],
  cache: LinearState,
  key: Float[Array, "B P K H"],
  value: Float[Array, "B P K V"],
  keep: Bool[Array, "B P"],
) -> LinearState:
  """The state with the keys that `keep` names; time P·K·M·(H+V).

  Memory in addition to the arguments: P·M for each key head.
  """
  key_rows, value_rows = (
    heads_first(x, key.shape[2]).astype(jnp.float32) for x in (key, value)
  )
  key_features = features.of(key_rows, parameters)
  return state.update(cache, key_features, value_rows, keep[:, None, :, None])


def decode(
  features: FeatureMap,
  parameters: tuple[Array, ...],
  cache: LinearState,
  query: Float[Array, "B 1 N H"],
  key: Float[Array, "B 1 K H"],
  value: Float[Array, "B 1 K V"],
) -> tuple[Float[Array, "B 1 N V"], LinearState]:
  """One position of the causal call; time N·M·(H+V) at every position."""
  query_rows, key_rows, value_rows = (
    heads_first(x, key.shape[2]).astype(jnp.float32)
    for x in (query, key, value)
  )
  key_features = features.of(key_rows, parameters)
  cache = state.update(cache, key_features, value_rows, None)
  query_features = features.of(query_rows, parameters)
  out, _ = state.normalised(*state.read_out(cache, query_features))
  return heads_last(out, 1).astype(query.dtype), cache
