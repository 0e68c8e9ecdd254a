"""Checks of the arguments of attention functions, in one table.

Checks read only shapes, dtypes and Python numbers, at trace time. An error message
names the argument, what was expected and what was given.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
import math
from numbers import Real
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray, Array, Bool, Float, Int
import numpy as np

from attention.platform.programs import axis_size

FromZero = Annotated[int, "at least 0"]
"""An int of at least 0; a plain `int` is at least 1."""

ARRAYS: Mapping[str, Any] = {
  "query": Float[Array, "B T N H"],
  "key": Float[Array, "B S K H"],
  "value": Float[Array, "B S K V"],
  "mask": Bool[Array, "..."],
  "query_segment_ids": Int[Array, "B T"],
  "key_segment_ids": Int[Array, "B S"],
  "bias": Float[Array, "..."],
  "sinks": Float[Array, "..."],
  "log_forget": Float[Array, "B T N"],
}
"""Annotations of the arrays that have the same meaning in every function."""

_QKV = ("query", "key", "value")

_BOOL = "bool (True = attend; additive biases are the option `bias`)"
_KINDS: Mapping[Any, tuple[Any, str]] = {
  Float: (jnp.floating, "a float dtype"),
  Int: (jnp.integer, "integers"),
  Bool: (jnp.bool_, _BOOL),
}
"""jaxtyping's kind -> its dtype, and its name in error messages."""


def check_call(
  given: Mapping[str, Any],
  arrays: Mapping[str, Any] | None = None,
  checks: Mapping[str, "Check"] | None = None,
  needed: Collection[str] = (),
) -> None:
  """Checks the arrays of a call, and then its options by name.

  Args:
    given: argument -> value.
    arrays: argument -> annotation, such as `Float[Array, "B S K H"]`. A letter has
      the same size in all of them, and a number is a size; for "..." only the dtype
      is checked. None means `ARRAYS`.
    checks: argument -> check. None means `CHECKS`.
    needed: arguments that must not be None.

  Raises:
    ValueError: a value is not an array, does not fit its annotation, is empty, is a
      float of 8 bits, or fails its check; or N is not a multiple of K.
  """
  arrays = ARRAYS if arrays is None else arrays
  checks = CHECKS if checks is None else checks
  given = {n: x for n, x in given.items() if x is not None or n in needed}
  for name in arrays:
    if name in given and not hasattr(given[name], "dtype"):
      hint = "; jax.random.key(0) makes one" * name.endswith("_rng")
      if isinstance(given[name], list | tuple):
        hint = f"; jnp.asarray({name}) makes one"
      kind = type(given[name]).__name__
      raise ValueError(f"{name}: expected an array, got {kind}{hint}")
  sizes: dict[str, int] = {}
  for name, annotation in arrays.items():
    if name not in given or not issubclass(annotation, AbstractArray):
      continue
    kind, kind_name = _KINDS[annotation.dtype]
    if not jnp.issubdtype(given[name].dtype, kind):
      raise ValueError(f"{name}: expected {kind_name}, got {given[name].dtype}")
    if kind is jnp.floating and jnp.finfo(given[name].dtype).bits < 16:
      raise ValueError(
        f"{name}: expected a float dtype of at least 16 bits, got "
        f"{given[name].dtype}, which needs a scale of its own; give "
        f"{name}.astype(jnp.bfloat16) times that scale"
      )
    if not any(x in annotation.dim_str for x in "*."):
      _check_sizes(name, given[name].shape, annotation.dim_str.split(), sizes)
    if "U" in sizes:
      _check_heads(sizes)
    elif sizes.get("N", 0) % sizes.get("K", 1):
      raise ValueError(
        f"query: its {sizes['N']} heads are not a multiple of the {sizes['K']} "
        "key/value heads"
      )
  for name, value in given.items():
    if name in checks:
      checks[name](name, value, sizes, given)


def _check_sizes(
  name: str, shape: tuple[int, ...], letters: list[str], sizes: dict[str, int]
) -> None:
  """Checks a shape, and adds the size of each of its letters to `sizes`."""
  if len(shape) != len(letters):
    hint = "; as_attention_fn(function) takes arrays without a batch"
    raise ValueError(
      f"{name}: expected {len(letters)} axes [{', '.join(letters)}], got shape "
      f"{shape}" + hint * (name in _QKV and len(shape) == 3)
    )
  known = dict(sizes)
  for letter, size in zip(letters, shape, strict=True):
    if letter != "B" and jax.export.is_symbolic_dim(size):
      raise ValueError(
        f"{name}: expected a number for {letter}, got {size}; only the batch may be "
        "symbolic, so export a program for each length"
      )
    expected_size = int(letter) if letter.isdigit() else size
    if sizes.setdefault(letter, expected_size) != size:
      expected = ", ".join(str(known.get(x, x)) for x in letters)
      # A key "B T K H" belongs to the same sequence as the queries.
      is_self_attention = name in _QKV and "T" in letters
      raise ValueError(
        f"{name}: expected [{expected}] for [{', '.join(letters)}], got shape "
        f"{shape}" + "; for cross-attention use dense" * is_self_attention
      )
    if not size and letter in "BTSNQKUHVI":
      raise ValueError(
        f"{name}: expected sizes of at least one, got shape {shape}"
      )


_HEADS = {"Q": "query", "K": "key", "U": "value"}
"""Letter of a recurrence's head count -> the array that has these heads."""


def _check_heads(sizes: dict[str, int]) -> None:
  """Checks that N, the largest head count, is a multiple of the others."""
  largest = max(_HEADS, key=lambda letter: sizes[letter])
  sizes.setdefault("N", sizes[largest])
  for letter, name in _HEADS.items():
    if sizes[largest] % sizes[letter]:
      raise ValueError(
        f"{_HEADS[largest]}: its {sizes[largest]} heads are not a multiple of the "
        f"{sizes[letter]} heads of {name}"
      )


def check_qkv(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
) -> None:
  """Raises ValueError unless the shapes of query, key and value fit."""
  check_call({"query": query, "key": key, "value": value}, needed=_QKV)


def check_pairs(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  value: Float[Array, "B S K V"],
  *,
  mask: Bool[Array, "..."] | None = None,
  bias: Float[Array, "..."] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
) -> None:
  """Raises ValueError unless mask, bias, segments and dropout fit query and key."""
  check_call(locals(), needed=_QKV)


def check_features(name: str, features: int) -> None:
  """Raises ValueError if `Dims.features` is 0, for a mechanism that needs it."""
  if features < 1:
    raise ValueError(
      f"features: {name} computes its gates from inputs of that width; expected at "
      f"least 1, got {features}"
    )


def check_mask(
  mask: Bool[Array, "..."] | None, shape: tuple[int, int, int, int]
) -> None:
  """Raises ValueError unless a mask is bool and broadcasts to `[B, N, T, S]`."""
  if mask is None:
    return
  if mask.dtype != jnp.bool_:
    raise ValueError(f"mask: expected {_BOOL}, got {mask.dtype}")
  check_broadcast("mask", mask, shape)


_INDICES = {
  "TS": "None, None",
  "BS": ":, None, None, :",
  "BTS": ":, None",
  "NTS": "None",
}
"""Axes of an array -> the index that inserts the missing ones."""


def check_broadcast(
  name: str, array: Array, shape: tuple[int, int, int, int]
) -> None:
  """Raises ValueError unless an array of rank 4 broadcasts to `shape`."""
  sizes = zip(array.shape, shape, strict=False)
  if array.ndim != 4 or any(x not in (1, full) for x, full in sizes):
    fitting = [
      f"{name}[{index}] for [{', '.join(axes)}]"
      for axes, index in _INDICES.items()
      if array.shape == tuple(shape["BNTS".index(x)] for x in axes)
    ]
    hint = f"; give {' or '.join(fitting)}" if fitting else ""
    raise ValueError(
      f"{name}: expected rank 4, broadcastable to [B, N, T, S] = "
      f"{list(shape)}, got shape {array.shape}{hint}"
    )


def key_mask(
  mask: Bool[Array, "..."] | None,
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"],
  instead: str = "dense attention supports masks that vary",
) -> Bool[Array, "B S"] | None:
  """Converts a key mask `[B, 1, 1, S]` to `[B, S]`.

  Raises:
    ValueError: the mask varies along queries or heads, or does not broadcast;
      `instead` ends the message with an alternative.
  """
  if mask is None:
    return None
  batch, length, num_heads, _ = query.shape
  check_mask(mask, (batch, num_heads, length, key.shape[1]))
  if mask.shape[1:3] != (1, 1):
    causal = "; a causal mask is is_causal=True" * (mask.shape[2] > 1)
    raise ValueError(
      "mask: expected a key mask key_mask[:, None, None, :] of shape "
      "[B, 1, 1, S], the same for every query and head, got shape "
      f"{mask.shape}{causal}; {instead}"
    )
  return jnp.broadcast_to(mask[:, 0, 0, :], (batch, key.shape[1]))


def _check_segments(name, ids, sizes, given) -> None:
  del name, ids, sizes
  for missing in ("query_segment_ids", "key_segment_ids"):
    if missing not in given:
      raise ValueError(
        f"{missing}: expected both or neither of query_segment_ids and "
        "key_segment_ids, got one"
      )


def _check_log_forget(name, log_forget, sizes, given) -> None:
  del log_forget
  # With `visible`, `logits_from_options` checks causality.
  if not given.get("is_causal") and "visible" not in given:
    raise ValueError(
      f"{name}: expected is_causal=True with it, got False; forget gates lie "
      "between a query and an earlier key"
    )
  length, source = sizes["T"], sizes.get("S", sizes["T"])
  if source != length:
    raise ValueError(
      f"{name}: expected query and key of one length, got {length} and {source}"
    )


def _check_sinks(name, sinks, sizes, _) -> None:
  """Sinks are `[N]` or `[B, T, N]`; a factory takes True, False or 'inputs'."""
  if not hasattr(sinks, "shape"):
    if isinstance(sinks, bool) or sinks == "inputs":
      return
    raise ValueError(f"{name}: expected True, False or 'inputs', got {sinks!r}")
  shape = [sizes[letter] for letter in "BTN"]
  if list(sinks.shape) not in (shape[2:], shape):
    raise ValueError(
      f"{name}: expected {shape[2:]} for [N], or {shape} for [B, T, N], got "
      f"shape {sinks.shape}"
    )


TABLES = {
  "relative_bias": "N D",
  "relative_keys": "... E H",
  "relative_queries": "... P H",
}
"""Table of relative distances -> its annotation."""


def _check_table(name, table, sizes, _) -> None:
  """Checks the heads, features and (odd) number of distances of a table."""
  heads, width, shape = sizes["N"], sizes["H"], table.shape
  if name == "relative_bias":
    expected = f"[{heads}, 2L+1]"
    fits = len(shape) == 2 and shape[0] == heads and shape[1] % 2 == 1
  else:
    expected = f"[2L+1, {width}] or [{heads}, 2L+1, {width}]"
    fits = len(shape) > 1 and shape[-2] % 2 == 1 and shape[-1] == width
    fits = fits and shape[:-2] in ((), (heads,))
  if not fits:
    raise ValueError(
      f"{name}: expected {expected}, one entry for each distance -L … L of "
      f"key from query, got shape {shape}"
    )


def _check_dropout(name, rate, sizes, given) -> None:
  """A rate is in [0, 1). One above 0 needs a random key, or keys `[1, 1]`."""
  del sizes
  rng = given.get("dropout_rng")
  if not 0.0 <= rate < 1.0:
    raise ValueError(f"{name}: expected [0, 1), got {rate}")
  if rate and rng is None:
    raise ValueError(f"dropout_rng: expected a key for {name} {rate}, got None")
  if rate and np.ndim(rng) > 1 and rng.shape != (1, 1):
    raise ValueError(
      "dropout_rng: expected one key, or keys [1, 1] that all examples and heads "
      f"share, got shape {rng.shape}"
    )


def check_soft_cap(cap: float, name: str = "logits_soft_cap") -> None:
  """Raises ValueError unless c in c · tanh(x / c) is finite and above 0."""
  is_number = isinstance(cap, int | float) and not isinstance(cap, bool)
  if not (is_number and 0.0 < cap < math.inf):
    raise ValueError(f"{name}: expected a finite number above 0, got {cap!r}")


def softmax_scale(
  scale: float | Float[Array, ""] | None, head_dim: int
) -> float | Float[Array, ""]:
  """Returns `scale`, or 1/√H if it is None.

  Raises:
    ValueError: `scale` is neither a scalar array nor a finite number.
  """
  if scale is None:
    return 1.0 / math.sqrt(head_dim)
  if np.ndim(scale):
    raise ValueError(
      f"scale: expected one number, got shape {np.shape(scale)}; to scale heads "
      "or queries differently, multiply query and give scale=1.0"
    )
  if isinstance(scale, jax.Array):
    return scale
  is_number = isinstance(scale, int | float | np.number | np.ndarray)
  if not is_number or isinstance(scale, bool):
    raise ValueError(f"scale: expected a number or None, got {scale!r}")
  if not math.isfinite(scale):
    raise ValueError(f"scale: expected a finite number, got {scale}")
  return scale


def check_static(name: str, value: Any) -> None:
  """Raises ValueError if an option that must be static is traced."""
  for x in jax.tree.leaves(value):
    if isinstance(x, jax.core.Tracer):
      raise ValueError(
        f"{name}: expected a Python value, got a traced {x.dtype}; the "
        f"compiled program depends on it, so give jax.jit static_argnames={name!r}, "
        f"or bind it with functools.partial(function, {name}=…)"
      )


def check_at_least(name: str, value: int, low: int) -> None:
  """Raises ValueError unless a count is an int of at least `low`."""
  check_static(name, value)
  is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not is_int or value < low:
    raise ValueError(
      f"{name}: expected an int of at least {low}, got {value!r}"
    )


def check_number(name: str, value: float) -> None:
  """Raises ValueError unless a value is a finite number."""
  is_number = isinstance(value, Real) and not isinstance(value, bool)
  if not is_number or not math.isfinite(value):
    raise ValueError(f"{name}: expected a finite number, got {value!r}")


def check_flag(name: str, value: bool) -> None:
  """Raises ValueError unless a flag is a bool; the string 'False' would be true."""
  check_static(name, value)
  if not isinstance(value, bool | np.bool_):
    raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_choice(
  name: str, value: Any, known: Sequence[str], may_be_none: bool
) -> None:
  """Raises ValueError unless a value is one of the known strings."""
  if value not in known and not (value is None and may_be_none):
    raise ValueError(
      f"{name}: expected {'None or ' * may_be_none}one of {', '.join(known)}, "
      f"got {value!r}"
    )


def block_sizes(
  block_size: int | tuple[int, int] | None,
) -> tuple[int, int] | None:
  """(queries, keys) of a block; None means the platform's choice.

  Raises:
    ValueError: `block_size` is neither a positive int nor a pair of them.
  """
  if block_size is None:
    return None
  sizes = block_size if isinstance(block_size, tuple) else (block_size,) * 2
  if len(sizes) != 2 or any(type(x) is not int or x < 1 for x in sizes):
    raise ValueError(
      "block_size: expected a positive int or a pair (queries, keys), got "
      f"{block_size!r}"
    )
  return sizes[0], sizes[1]


Check = Callable[[str, Any, Mapping[str, int], Mapping[str, Any]], Any]
"""`(name, value, letter -> size, argument -> value)`; raises ValueError."""


def _shape(sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
  """The shape `[B, N, T, S]` of logits; S is T in self-attention."""
  return sizes["B"], sizes["N"], sizes["T"], sizes.get("S", sizes["T"])


CHECKS: Mapping[str, Check] = {
  "is_causal": lambda name, flag, *_: check_flag(name, flag),
  "mask": lambda _, mask, sizes, __: check_mask(mask, _shape(sizes)),
  "scale": lambda _, scale, *__: softmax_scale(scale, 1),
  **dict.fromkeys(("query_segment_ids", "key_segment_ids"), _check_segments),
  "bias": lambda name, x, sizes, _: check_broadcast(name, x, _shape(sizes)),
  "logits_soft_cap": lambda _, cap, *__: check_soft_cap(cap),
  "sinks": _check_sinks,
  "log_forget": _check_log_forget,
  **dict.fromkeys(TABLES, _check_table),
  "dropout_rate": _check_dropout,
  "axis_name": lambda _, axis, *__: axis_size(axis),
}
"""Option -> its check, in every function that takes it."""
