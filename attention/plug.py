"""The plug: what `(init, update)` is to Optax, `Attention` is to attention."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxtyping import Array

Variables = Mapping[str, Any]
"""`{}`, `{'params': …}` that are trained, or `{'constants': …}` that are not."""

Cache = Any
"""A pytree of arrays, each with leading axis B."""


class Dims(NamedTuple):
  """Sizes that a mechanism needs to make its variables and caches.

  Attributes:
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; N is a multiple of K.
    head_dim: H.
    max_length: the longest key sequence (Linformer's S).
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_length: int


class Attention(NamedTuple):
  """One attention mechanism as a record of pure functions.

  Attributes:
    init: `(key, dims) -> variables`.
    apply: `(variables, query, key, value, **call) -> out`; `call` holds
      `mask`, `is_causal`, `scale`, … and an option that the mechanism cannot
      honour raises ValueError.
    init_cache: `(variables, batch, max_length, dims, dtype) -> cache`, or None
      where the mechanism cannot decode token by token.
    decode: `(variables, cache, query, key, value) -> (out, cache)` for one
      position, `query [B, 1, N, H]`; equals the causal call on the whole
      sequence. None where `init_cache` is.
    supports: what works, by name; what is not named raises.
      'causal'    is_causal=True
      'cross'     query and key of different lengths
      'rowwise'   a query's output depends on no other query and not on its
                  own position, so a decoder may cross-attend token by token
      'mask'      a key mask [B, 1, 1, S]
      'full_mask' a mask that varies along T and N
      'segments'  query_segment_ids and key_segment_ids
      'bias'      an additive bias [B, N, T, S]
      'relative'  relative_bias [N, 2L+1] and relative_keys [2L+1, H], in
                  `apply` and in `decode`
      'dropout'   dropout_rate with dropout_rng
      'decode'    init_cache and decode
      'global'    global_indices
      'shared_qk' query and key are one array: `apply` and `decode` want None
                  for the key
  """

  init: Callable[[Array, Dims], Variables]
  apply: Callable[..., Array]
  init_cache: Callable[..., Cache] | None
  decode: Callable[..., tuple[Array, Cache]] | None
  supports: frozenset[str]


def no_variables(key: Array, dims: Dims) -> Variables:
  """The `init` of a mechanism without variables."""
  del key, dims
  return {}
