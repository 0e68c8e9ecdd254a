"""Argument checks that every attention function shares.

Each check runs on shapes and dtypes alone, so it costs nothing in a compiled
program and raises while the program is traced. Every message names the
argument, what was expected and what came.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
import difflib
import functools
import inspect
import math
from typing import Any, ParamSpec, TypeVar, get_args

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray, Array, Bool, Float, Int
import numpy as np

from attention import plug

P = ParamSpec("P")
R = TypeVar("R")

MOST_BYTES = 2**32
"""Arrays of one mechanism beyond this size are taken for a typing error."""

_mechanisms: Mapping[str, Callable[..., plug.Attention]] = {}

_functions: dict[str, Mapping[str, inspect.Parameter]] = {}
"""Public attention function -> its parameters, in the order of imports."""

# What Flax's modules hand to an `attention_fn` and no function here takes.
_FLAX = frozenset(
  {
    "broadcast_dropout",
    "deterministic",
    "dtype",
    "force_fp32_for_softmax",
    "module",
    "precision",
    "qk_attn_weights_einsum",
    "attn_weights_value_einsum",
  }
)


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


def attention_function(
  **instead: str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Decorates a public attention function: every wrong name is a ValueError.

  Before the function is called, the decorator refuses an option that it does
  not take, an option that it needs and that is missing, an option given by
  position, and any value other than an array where the annotation says array.

  Args:
    **instead: hyperparameter of the mechanism that the function does not take
      -> what to give the function in its place.

  Returns:
    The decorator. Signature, annotations and docstring stay as they are.
  """

  def decorate(function: Callable[P, R]) -> Callable[P, R]:
    name = getattr(function, "__name__", "attention")
    parameters = inspect.signature(function).parameters
    _functions[name] = parameters
    positional = [
      n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY
    ]
    needed = [n for n, p in parameters.items() if p.default is p.empty]
    arrays = [n for n, p in parameters.items() if _is_array(p.annotation)]

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
      if len(args) > len(positional):
        raise ValueError(
          f"{name}: expected {', '.join(positional)} by position and options "
          f"by name, got {len(args)} values by position"
        )
      # What only Flax passes tells more than what other mechanisms take.
      for option in sorted(options, key=lambda name: name not in _FLAX):
        if option not in parameters:
          hint = instead.get(option) or _hint(option, name, parameters)
          raise ValueError(f"{option}: {name} has no such option; {hint}")
      given = {**dict(zip(positional, args, strict=False)), **options}
      for option in needed:
        if option not in given:
          ways = [text for text in instead.values() if f"{option}=" in text]
          hint = f"; {ways[0]}" if ways else ""
          raise ValueError(f"{option}: {name} needs it, got nothing{hint}")
      for option in arrays:
        if option in needed or given.get(option) is not None:
          check_array(option, given[option])
      if not isinstance(given.get("is_causal", False), bool | np.bool_):
        raise ValueError(
          "is_causal: expected True or False, which decides what is compiled, "
          f"got {given['is_causal']!r}"
        )
      return function(*args, **options)

    return checked

  return decorate


def _is_array(annotation: Any) -> bool:
  """Whether an annotation allows an array, and neither a number nor a tuple."""
  allowed = get_args(annotation) or (annotation,)
  return all(
    isinstance(one, type)
    and issubclass(one, (AbstractArray, jax.Array, type(None)))
    for one in allowed
  )


def check_array(name: str, value: Any) -> None:
  """Checks that a value is an array.

  Raises:
    ValueError: it has no shape and dtype, as a list or a Python number.
  """
  if hasattr(value, "shape") and hasattr(value, "dtype"):
    return
  hint = ""
  if isinstance(value, (list, tuple)):
    hint = f"; jnp.asarray({name}) makes one"
  elif name.endswith("_rng"):
    hint = "; jax.random.key(0) makes one"
  raise ValueError(
    f"{name}: expected an array, got {type(value).__name__}{hint}"
  )


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
    check_array(name, array)
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
      f"query: its {num_heads} heads are not a multiple of the {key.shape[2]} "
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
  mask: Bool[Array, "..."] | None = None,
  bias: Float[Array, "..."] | None = None,
  query_segment_ids: Int[Array, "B T"] | None = None,
  key_segment_ids: Int[Array, "B S"] | None = None,
  dropout_rate: float = 0.0,
  dropout_rng: Array | None = None,
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


def check_logit_options(
  query: Float[Array, "B T N H"],
  key: Float[Array, "B S K H"] | None,
  is_causal: bool,
  *,
  sinks: Float[Array, "N"] | None = None,
  logits_soft_cap: float | None = None,
  log_forget: Float[Array, "B T N"] | None = None,
) -> None:
  """Checks what an exact mechanism does to its logits.

  Args:
    query: `[B, T, N, H]`.
    key: `[B, S, K, H]`; None where one position is decoded.
    is_causal: whether queries see no later keys.
    sinks: `[N]`.
    logits_soft_cap: above 0.
    log_forget: `[B, T, N]`, for causal calls with T = S.

  Raises:
    ValueError: one of them does not fit.
  """
  batch, length, num_heads, _ = query.shape
  if sinks is not None and sinks.shape != (num_heads,):
    raise ValueError(
      f"sinks: expected one for each of {num_heads} heads, got shape "
      f"{sinks.shape}"
    )
  if logits_soft_cap is not None:
    check_soft_cap(logits_soft_cap)
  if log_forget is None:
    return
  if log_forget.shape != (batch, length, num_heads):
    raise ValueError(
      f"log_forget: expected [B, T, N] = {(batch, length, num_heads)}, got "
      f"shape {log_forget.shape}"
    )
  if not is_causal:
    raise ValueError(
      "log_forget: expected is_causal=True with it, got False; what is "
      "forgotten lies between a query and an earlier key"
    )
  if key is not None and key.shape[1] != length:
    raise ValueError(
      f"log_forget: expected query and key of one length, got {length} and "
      f"{key.shape[1]}"
    )


def check_soft_cap(cap: float) -> None:
  """Checks c of c · tanh(x / c).

  Raises:
    ValueError: it is not a finite number above 0.
  """
  is_number = isinstance(cap, int | float) and not isinstance(cap, bool)
  if not is_number or not 0.0 < cap < math.inf:
    raise ValueError(
      f"logits_soft_cap: expected a finite number above 0, got {cap!r}"
    )


def softmax_scale(
  scale: float | Float[Array, ""] | None, head_dim: int
) -> float | Float[Array, ""]:
  """Returns `scale`, or 1/√H where it is None.

  Raises:
    ValueError: `scale` is neither an array nor a finite number.
  """
  if scale is None:
    return 1.0 / math.sqrt(head_dim)
  is_number = isinstance(scale, int | float | np.number | np.ndarray)
  if not isinstance(scale, jax.Array) and not is_number:
    raise ValueError(f"scale: expected a number or None, got {scale!r}")
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
  if (
    not isinstance(value, (int, np.integer))
    or isinstance(value, bool)
    or value < low
  ):
    raise ValueError(
      f"{name}: expected an int of at least {low}, got {value!r}"
    )


def check_flag(name: str, value: bool) -> None:
  """Checks that a hyperparameter is True or False.

  Raises:
    ValueError: it is not; text such as 'False' would count as true.
  """
  if not isinstance(value, bool):
    raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_memory(name: str, value: int, numbers: int) -> None:
  """Checks that the arrays that follow from a size can be meant.

  What is too large depends on the other sizes, so the bound is on bytes and
  not on the hyperparameter.

  Args:
    name: the hyperparameter.
    value: its size.
    numbers: how many numbers of four bytes the mechanism keeps with it.

  Raises:
    ValueError: they take more than `MOST_BYTES`.
  """
  if 4 * numbers > MOST_BYTES:
    raise ValueError(
      f"{name}: expected a size whose arrays take at most "
      f"{MOST_BYTES / 2**30:g} GiB, got {value}, whose arrays take "
      f"{numbers / 2**28:,.0f} GiB"
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
  name: str,
  function: Callable[..., Any],
  options: Mapping[str, Any],
  own: Collection[str] = (),
) -> dict[str, Any]:
  """Returns the options of a call that `function` takes, or raises.

  An option of another mechanism that is None, False or a zero rate asks for
  nothing, so it is dropped where `function` does not take it.

  Args:
    name: the mechanism, for the message.
    function: an attention function with keyword-only options.
    options: what the caller passed.
    own: options of `function` that the mechanism's record gives it.

  Returns:
    The options that `function` takes.

  Raises:
    ValueError: `function` does not take an option that asks for something, no
      mechanism takes it, or the record gives it already.
  """
  known = inspect.signature(function).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
  accepted = {}
  for option, asked in options.items():
    if option in own:
      instead = f"call {name}_attention to give another"
      if option in _hyperparameters(name):
        instead = f"pass it to {name}({option}=…), which makes the record"
      raise ValueError(
        f"{option}: the record of {name} attention has its own, expected none; "
        f"{instead}"
      )
    if option in known or takes_any:
      accepted[option] = asked
    elif option not in plug.CALL_OPTIONS or not (
      asked is None or (isinstance(asked, (bool, int, float)) and not asked)
    ):
      raise ValueError(
        f"{option}: {name} attention has no such option; "
        f"{_hint(option, name, known)}"
      )
  return accepted


def near(got: str, known: Iterable[str]) -> str:
  """The text "; did you mean 'b'?", or nothing where no name is like it."""
  found = difflib.get_close_matches(got, list(known), n=1)
  return f"; did you mean {found[0]!r}?" if found else ""


def _hyperparameters(name: str) -> Collection[str]:
  """Names of what the factory of a registered mechanism takes."""
  factory = _mechanisms.get(name)
  return () if factory is None else inspect.signature(factory).parameters


def _hint(
  option: str, name: str, known: Mapping[str, inspect.Parameter]
) -> str:
  """What to do about an option that `name` does not take."""
  mechanism = name.removesuffix("_attention")
  if option in _FLAX:
    return (
      "Flax's modules pass it: give them "
      f"attention_fn=as_attention_fn({mechanism}_attention)"
    )
  if option in plug.CALL_OPTIONS:
    having = plug.supporting(_mechanisms, plug.CALL_OPTIONS[option])
  else:
    having = [n for n, parameters in _functions.items() if option in parameters]
  factories = [
    f"{n}({option}=…)" for n in _mechanisms if option in _hyperparameters(n)
  ]
  if f"{mechanism}({option}=…)" in factories:
    return f"give it when the mechanism is made: {mechanism}({option}=…)"
  *others, last = ["", *(having or factories)]
  if not last:
    names = [
      n
      for n, p in known.items()
      if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
    ]
    return f"it takes {', '.join(names)}{near(option, names)}"
  others = ", ".join(others[1:])
  return f"{others} and {last} have it" if others else f"{last} has it"
