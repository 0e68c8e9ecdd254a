"""Checks of the arguments of `decode` and `prefill`.

The decorator of factories adds them to each mechanism, so that a call that does not fit
its cache raises, instead of broadcasting over the cache or writing past its end.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int
import numpy as np

from attention import checks
from attention.mechanism import Attention
from attention.names import unknown_option
from attention.platform import programs

_QKV = ("query", "key", "value")
_PREFILL = {"query": checks.ARRAYS["query"], "lengths": Int[Array, "B"]}
_WHOLE = (
  *("mask", "is_causal", "query_segment_ids", "key_segment_ids", "visible"),
  *("bias", "global_indices", "global_qkv", "dropout_rate", "dropout_rng"),
  *("axis_name", "return_lse"),
)
"""Options of calls on whole sequences, which `decode` and `prefill` do not have."""


def _cache_options_check(
  name: str, function: Callable[..., Any]
) -> Callable[[Mapping[str, Any]], None]:
  """Builds a function that raises ValueError for options without a meaning here.

  Args:
    name: 'decode' or 'prefill'.
    function: the function of this name, whose signature is read once.
  """
  parameters = inspect.signature(function).parameters.values()
  known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)

  def check(call):
    for option in call:
      if option in _WHOLE:
        raise ValueError(
          f"{option}: expected none in {name}, whose queries see the earlier "
          "positions of their own example, got one; give it to apply"
        )
      if option not in known and not takes_any:
        raise ValueError(unknown_option(option, name, known))

  return check


def _check_rows(cache: Any, arrays: Sequence[Any]) -> None:
  """Raises ValueError unless query, key and value have the sizes of the cache."""
  query, key, value = arrays
  _, length, _, head_dim = query.shape
  batch = jax.tree.leaves(cache)[0].shape[0]
  expected = {"query": (batch, *query.shape[1:])}
  rows: Any = getattr(cache, "value", None)
  heads = None
  if rows is not None and rows.ndim == 4:  # Not a single row, as in a state.
    heads = rows.shape[2] // getattr(cache, "rows_per_head", 1)
  if value is not None:
    sizes = value.shape[2:] if heads is None else (heads, rows.shape[3])
    expected["value"] = (batch, length, *sizes)
  if key is not None:
    key_heads = key.shape[2] if heads is None else heads
    expected["key"] = (batch, length, key_heads, head_dim)
  for name, x in zip(_QKV, arrays, strict=True):
    if x is not None and x.shape != expected[name]:
      raise ValueError(
        f"{name}: expected {list(expected[name])}, as the cache and the query have, "
        f"got shape {x.shape}"
      )


def with_cache_checks(record: Attention) -> Attention:
  """Adds checks of the arguments of `decode` and `prefill`.

  They also raise if a growing cache is full. If the index is traced, `decode` returns
  NaN instead.
  """
  decode: Any = record.decode
  prefill: Any = record.prefill
  if decode:
    check_decode_options = _cache_options_check("decode", decode)
  if prefill:
    check_prefill_options = _cache_options_check("prefill", prefill)

  def capacity_of(cache):
    positions = int(getattr(cache, "grows", False))
    return cache[0].shape[1] * positions if positions else None

  def raise_full(capacity, position):
    raise ValueError(
      f"cache: expected a position below its max_length {capacity}, got "
      f"{position}; pass a larger max_length to init_cache(variables, batch, "
      "max_length, …)"
    )

  @functools.wraps(decode)
  def checked_decode(variables, cache, *arrays, **call):
    check_decode_options(call)
    for name, x in zip(_QKV, arrays, strict=False):
      if x is not None and (x.ndim != 4 or x.shape[1] != 1):
        raise ValueError(
          f"{name}: decode expected one position [B, 1, heads, features], got shape "
          f"{x.shape}"
        )
    _check_rows(cache, arrays)
    capacity = capacity_of(cache)
    if capacity is None:
      return decode(variables, cache, *arrays, **call)
    # NumPy reads the index, because `jnp` would trace it inside `jit`.
    is_known = not programs.is_traced(cache.index)
    if is_known and (position := np.asarray(cache.index).max()) >= capacity:
      raise_full(capacity, position)
    out, new_cache = decode(variables, cache, *arrays, **call)
    if not is_known:
      is_full = (cache.index >= capacity)[:, None, None, None]
      out = jnp.where(is_full, jnp.nan, out)
    return out, new_cache

  @functools.wraps(prefill)
  def checked_prefill(variables, cache, query, key, value, lengths, **call):
    check_prefill_options(call)
    checks.check_call(
      {"query": query, "lengths": lengths}, _PREFILL, needed=_PREFILL
    )
    _check_rows(cache, (query, key, value))
    capacity, length = capacity_of(cache), query.shape[1]
    if not programs.is_traced(lengths):
      known = np.asarray(lengths)
      low, high = known.min(), known.max()
      if low < 0 or high > length:
        raise ValueError(
          f"lengths: expected 0 to {length}, the positions of the query, got {low} "
          f"to {high}"
        )
    if capacity is not None and length > capacity:
      raise_full(capacity, length - 1)
    index = getattr(cache, "index", 0)  # A tuple has a method of this name.
    is_known = not callable(index) and not programs.is_traced(index)
    if is_known and np.asarray(index).any():
      raise ValueError(
        "cache: prefill expected an empty cache, which it overwrites, got one with "
        f"{np.max(index)} positions; give further positions to decode"
      )
    # The index of the cache, which counts further in this dtype.
    lengths = jnp.asarray(lengths, jnp.int32)
    return prefill(variables, cache, query, key, value, lengths, **call)

  return record._replace(
    decode=decode and checked_decode, prefill=prefill and checked_prefill
  )
