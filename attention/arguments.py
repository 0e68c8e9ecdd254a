"""Argument checks that every attention function shares.

Each check runs on shapes and dtypes alone, so it costs nothing in a compiled
program and raises while the program is traced. Every message names the
argument, what was expected and what came.
"""

from collections.abc import Callable, Mapping
import inspect
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attention import plug

_mechanisms: Mapping[str, Callable[..., plug.Attention]] = {}


def register(
  mechanisms: Mapping[str, Callable[..., plug.Attention]],
) -> None:
  """Registers the mechanisms that an error message may recommend.

  `attention.registry` calls this once. It imports the mechanisms, and they
  import this module, so this module cannot import the registry.

  Args:
    mechanisms: name -> factory.
  """
  global _mechanisms
  _mechanisms = mechanisms


def check_qkv(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
) -> None:
  """Checks that query, key and value fit together.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`, N a multiple of K.
    value: `[B, S, K, V]`; V may differ from H.

  Raises:
    ValueError: a rank, a size or a dtype does not fit.
  """
  for name, array in (("query", query), ("key", key), ("value", value)):
    if array.ndim != 4:
      raise ValueError(
        f"{name}: expected 4 axes [batch, length, heads, features], got shape "
        f"{array.shape}"
      )
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name}: expected a float dtype, got {array.dtype}")
    if not array.size:
      raise ValueError(
        f"{name}: expected at least one of everything, got shape {array.shape}"
      )
  batch, _, num_heads, head_dim = query.shape
  if key.shape[0] != batch or key.shape[3] != head_dim:
    raise ValueError(
      f"key: expected [{batch}, S, K, {head_dim}] to go with query "
      f"{query.shape}, got {key.shape}"
    )
  if value.shape[:3] != key.shape[:3]:
    raise ValueError(
      f"value: expected {(*key.shape[:3], 'V')} to go with key {key.shape}, "
      f"got {value.shape}"
    )
  if num_heads % key.shape[2]:
    raise ValueError(
      f"query: its {num_heads} heads are no multiple of the {key.shape[2]} "
      "key/value heads"
    )


def check_mask(
  mask: Bool[Array, "..."] | None, shape: tuple[int, int, int, int]
) -> None:
  """Checks that a mask is boolean and broadcasts to `shape` `[B, N, T, S]`.

  Raises:
    ValueError: `mask` is not boolean, not of rank 4, or does not broadcast.
  """
  if mask is None:
    return
  if mask.dtype != jnp.bool_:
    raise ValueError(
      f"mask: expected bool (True = attend), got {mask.dtype}; pass additive "
      "biases as `bias` where the mechanism has it"
    )
  check_broadcast("mask", mask, shape)


def check_broadcast(
  name: str, array: Array, shape: tuple[int, int, int, int]
) -> None:
  """Checks that `array` has rank 4 and that each axis is full or 1.

  Raises:
    ValueError: it does not; the message starts with `name`.
  """
  if array.ndim != 4 or any(
    got not in (1, full) for got, full in zip(array.shape, shape, strict=True)
  ):
    raise ValueError(
      f"{name}: expected rank 4, broadcastable to [B, N, T, S] = "
      f"{list(shape)}, got shape {array.shape}"
    )


def key_mask(
  mask: Bool[Array, "..."] | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  instead: str,
) -> Bool[Array, "B S"] | None:
  """Reads a mask that may vary along keys only.

  Args:
    mask: None, or boolean and broadcastable to `[B, 1, 1, S]`.
    query: fixes B, T and N.
    key: fixes S.
    instead: what to use for a mask along T or N, for the message.

  Returns:
    `[B, S]`, True = attend, or None.

  Raises:
    ValueError: the mask varies along queries or heads, or does not fit.
  """
  if mask is None:
    return None
  batch, length, num_heads, _ = query.shape
  check_mask(mask, (batch, num_heads, length, key.shape[1]))
  if mask.shape[1] != 1 or mask.shape[2] != 1:
    raise ValueError(
      "mask: expected a key mask key_mask[:, None, None, :] of shape "
      "[B, 1, 1, S], the same for every query and head, got shape "
      f"{mask.shape}; {instead}"
    )
  return jnp.broadcast_to(mask[:, 0, 0, :], (batch, key.shape[1]))


def check_segment_ids(
  query_segment_ids: Int[Array, "B T"] | None,
  key_segment_ids: Int[Array, "B S"] | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
) -> None:
  """Checks that segment ids come in pairs and fit query and key.

  Raises:
    ValueError: only one of the two is given, or a shape or dtype is wrong.
  """
  if (query_segment_ids is None) != (key_segment_ids is None):
    missing = "query" if query_segment_ids is None else "key"
    raise ValueError(
      f"{missing}_segment_ids: expected both or neither of query_segment_ids "
      "and key_segment_ids, got one"
    )
  for name, ids, array in (
    ("query_segment_ids", query_segment_ids, query),
    ("key_segment_ids", key_segment_ids, key),
  ):
    if ids is None:
      continue
    if ids.shape != array.shape[:2] or not jnp.issubdtype(
      ids.dtype, jnp.integer
    ):
      raise ValueError(
        f"{name}: expected integers of shape {array.shape[:2]}, got "
        f"{ids.dtype} {ids.shape}"
      )


def check_pairs(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  mask: Bool[Array, "..."] | None,
  bias: Float[Array, "..."] | None,
  query_segment_ids: Int[Array, "B T"] | None,
  key_segment_ids: Int[Array, "B S"] | None,
  dropout_rate: float,
  dropout_rng: Array | None,
) -> None:
  """Checks the arguments of a function that treats each pair independently.

  Raises:
    ValueError: an argument is wrong, or two do not fit together.
  """
  check_qkv(query, key, value)
  batch, length, num_heads, _ = query.shape
  shape = (batch, num_heads, length, key.shape[1])
  check_mask(mask, shape)
  check_segment_ids(query_segment_ids, key_segment_ids, query, key)
  if bias is not None:
    check_broadcast("bias", bias, shape)
  check_dropout(dropout_rate, dropout_rng)


def check_dropout(rate: float, rng: Array | None) -> None:
  """Checks the two arguments of dropout on attention weights.

  Raises:
    ValueError: `rate` is not in [0, 1), or is positive while `rng` is None.
  """
  if not 0.0 <= rate < 1.0:
    raise ValueError(f"dropout_rate: expected [0, 1), got {rate}")
  if rate > 0.0 and rng is None:
    raise ValueError(
      f"dropout_rng: expected a key for dropout_rate {rate}, got None"
    )


def softmax_scale(
  scale: float | Float[Array, ""] | None, head_dim: int
) -> float | Float[Array, ""]:
  """Returns `scale`, or 1/√H where it is None.

  Raises:
    ValueError: `scale` is a Python number that is not finite.
  """
  if scale is None:
    return 1.0 / math.sqrt(head_dim)
  if not isinstance(scale, jax.Array) and not math.isfinite(scale):
    raise ValueError(f"scale: expected a finite number, got {scale}")
  return scale


def scaled_query(
  query: Float[Array, "B T N H"], scale: float | Float[Array, ""] | None
) -> tuple[Float[Array, "B T N H"], float]:
  """Queries, and the factor of their logits as a Python number.

  Loops over tiles need a number. A traced factor is multiplied into the
  queries.

  Args:
    query: `[B, T, N, H]`.
    scale: as the caller gave it; None is 1/√H.

  Returns:
    The queries, and the factor that remains for their logits.
  """
  scale = softmax_scale(scale, query.shape[-1])
  if isinstance(scale, jax.Array):
    return query * scale.astype(query.dtype), 1.0
  return query, float(scale)


def check_at_least(name: str, value: int, low: int) -> None:
  """Checks that a count is an int of at least `low`.

  Raises:
    ValueError: `value` is not an int, or below `low`.
  """
  if not isinstance(value, int) or isinstance(value, bool) or value < low:
    raise ValueError(
      f"{name}: expected an int of at least {low}, got {value!r}"
    )


def block_sizes(
  block_size: int | tuple[int, int] | None,
) -> tuple[int, int] | None:
  """(queries, keys) of a block; None is the platform's choice.

  Raises:
    ValueError: `block_size` is neither a positive int nor a pair of them.
  """
  if block_size is None:
    return None
  sizes = block_size if isinstance(block_size, tuple) else (block_size,) * 2
  if len(sizes) != 2 or any(
    not isinstance(size, int) or isinstance(size, bool) or size < 1
    for size in sizes
  ):
    raise ValueError(
      "block_size: expected a positive int or a pair (queries, keys), got "
      f"{block_size!r}"
    )
  return sizes[0], sizes[1]


def accepted_options(
  name: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the options of a call that `function` takes, or raises.

  An option of another mechanism that is None, False or a zero rate asks for
  nothing, so it is dropped where `function` does not take it.

  Args:
    name: the mechanism, for the message.
    function: an attention function with keyword-only options.
    options: what the caller passed.

  Returns:
    The options that `function` takes.

  Raises:
    ValueError: `function` does not take an option that asks for something, or
      no mechanism takes it.
  """
  known = inspect.signature(function).parameters
  accepted = {}
  for option, asked in options.items():
    if option in known:
      accepted[option] = asked
    elif option not in plug.CALL_OPTIONS or not (
      asked is None or (isinstance(asked, (bool, int, float)) and not asked)
    ):
      hint = _having(option) or f"it takes {', '.join(list(known)[3:])}"
      raise ValueError(f"{option}: {name} attention has no such option; {hint}")
  return accepted


def _having(option: str) -> str:
  """Says which mechanisms have an option; empty if none is known."""
  capability = plug.CALL_OPTIONS.get(option, "")
  *names, last = ["", *plug.supporting(_mechanisms, capability)]
  if not last:
    return ""
  others = ", ".join(names[1:])
  return f"{others} and {last} have it" if others else f"{last} has it"
