"""What a call of an attention function may have: one table of checks.

A check reads shapes, dtypes and Python numbers alone, so it costs nothing in a
compiled program and raises while the program is traced. Every message names the
argument, what was expected and what came.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
import difflib
import functools
import inspect
import math
import types
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray, Array, Bool, Float, Int
import numpy as np

from attention import plug

P = ParamSpec("P")
R = TypeVar("R")

MOST_BYTES = 2**32
"""Arrays of one mechanism beyond this size are taken for a typing error."""

ARRAYS: Mapping[str, Any] = {
  "query": Float[Array, "B T N H"],
  "key": Float[Array, "B S K H"],
  "value": Float[Array, "B S K V"],
  "mask": Bool[Array, "..."],
  "query_segment_ids": Int[Array, "B T"],
  "key_segment_ids": Int[Array, "B S"],
  "bias": Float[Array, "..."],
  "sinks": Float[Array, "N"],
  "log_forget": Float[Array, "B T N"],
}
"""The arrays that are the same in every function."""

_QKV = ("query", "key", "value")

_ARRAY = (AbstractArray, jax.Array)

_KINDS: Mapping[Any, tuple[Any, str]] = {
  Float: (jnp.floating, "a float dtype"),
  Int: (jnp.integer, "integers"),
  Bool: (
    jnp.bool_,
    "bool (True = attend; additive biases are the option `bias`)",
  ),
}
"""jaxtyping's kind -> its dtypes, in code and in words."""

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
  """Registers the mechanisms, by name, that an error message may recommend.

  `attention.registry` calls this once. It imports the mechanisms, and they
  import this module, so this module cannot import the registry.
  """
  global _mechanisms
  _mechanisms = mechanisms


def attention_function(
  **instead: str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Decorates a public attention function, and checks all its calls.

  A call is refused that has an option the function does not take, lacks one that
  it needs, gives an option by position, or has a value that does not fit: an array
  by its annotation (`check_call`), an option by its name (`CHECKS`) or its type
  (`TYPES`).

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
    needed = {n for n, p in parameters.items() if p.default is p.empty}
    arrays, checks = {}, dict(CHECKS)
    for option, parameter in parameters.items():
      allowed = _types(parameter.annotation)
      if allowed in TYPES:
        checks[option] = TYPES[allowed]
      elif get_origin(allowed[0]) is Literal:
        checks[option] = lambda name, value, *_, choices=parameter.annotation: (
          check_choice(name, value, choices)
        )
      elif all(isinstance(x, type) and issubclass(x, _ARRAY) for x in allowed):
        (arrays[option],) = allowed

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
      if len(args) > len(positional):
        raise ValueError(
          f"{name}: expected {', '.join(positional)} by position and options "
          f"by name, got {len(args)} values by position"
        )
      given = {**dict(zip(positional, args, strict=False)), **options}
      if not needed <= given.keys() <= parameters.keys():
        _refuse(given, name, parameters, instead)
      check_call(given, arrays, checks, needed)
      return function(*args, **options)

    return checked

  return decorate


def _types(annotation: Any) -> tuple[Any, ...]:
  """The types of a union, without None."""
  if get_origin(annotation) not in (types.UnionType, Union):
    return (annotation,)
  return tuple(x for x in get_args(annotation) if x is not type(None))


def check_call(
  given: Mapping[str, Any],
  arrays: Mapping[str, Any] | None = None,
  checks: Mapping[str, "Check"] | None = None,
  needed: Collection[str] = (),
) -> None:
  """Checks the arrays of a call, and then its options by their names.

  Args:
    given: argument -> value.
    arrays: argument -> annotation, such as `Float[Array, "B S K H"]`. A letter is
      one size in all of them; of "..." the dtype is checked. None is `ARRAYS`.
    checks: argument -> check. None is `CHECKS`.
    needed: arguments that may not be None.

  Raises:
    ValueError: a value is no array, has another dtype, rank or size than its
      annotation, is empty, or is refused by its check; N is no multiple of K.
  """
  arrays = ARRAYS if arrays is None else arrays
  checks = CHECKS if checks is None else checks
  given = {n: x for n, x in given.items() if x is not None or n in needed}
  for name in arrays:
    if name in given:
      check_array(name, given[name])
  sizes: dict[str, int] = {}
  for name, annotation in arrays.items():
    if name not in given or not issubclass(annotation, AbstractArray):
      continue
    kind, words = _KINDS[annotation.dtype]
    if not jnp.issubdtype(given[name].dtype, kind):
      raise ValueError(f"{name}: expected {words}, got {given[name].dtype}")
    letters = annotation.dim_str.split()
    if letters[:1] != ["..."]:
      _check_sizes(name, given[name].shape, letters, sizes)
    if sizes.get("N", 0) % sizes.get("K", 1):
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
  """Checks a shape, and adds its letters to those whose size is known."""
  if len(shape) != len(letters):
    raise ValueError(
      f"{name}: expected {len(letters)} axes [{', '.join(letters)}], got shape "
      f"{shape}"
    )
  known = dict(sizes)
  for letter, size in zip(letters, shape, strict=True):
    if sizes.setdefault(letter, size) != size:
      wanted = ", ".join(str(known.get(x, x)) for x in letters)
      # A key "B T K H" is one of the sequence that the queries are of.
      across = name in _QKV and "T" in letters
      raise ValueError(
        f"{name}: expected [{wanted}] for [{', '.join(letters)}], got shape "
        f"{shape}" + "; dense attention reads another sequence" * across
      )
    if not size and letter in "BTSNKHV":
      raise ValueError(
        f"{name}: expected at least one of everything, got shape {shape}"
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
  """Checks that query, key and value fit together; V may differ from H.

  Raises:
    ValueError: a rank, a size or a dtype does not fit.
  """
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
  """Checks the arguments of a function that treats each pair independently.

  Raises:
    ValueError: an argument is wrong, or two do not fit together.
  """
  check_call(locals(), needed=_QKV)


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
    raise ValueError(f"mask: expected {_KINDS[Bool][1]}, got {mask.dtype}")
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
  # Whether a `visible` is causal is asked where it is read.
  if not given.get("is_causal") and "visible" not in given:
    raise ValueError(
      f"{name}: expected is_causal=True with it, got False; what is forgotten "
      "lies between a query and an earlier key"
    )
  length, source_length = sizes["T"], sizes.get("S", sizes["T"])
  if source_length != length:
    raise ValueError(
      f"{name}: expected query and key of one length, got {length} and "
      f"{source_length}"
    )


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
  if isinstance(scale, jax.Array):
    return scale
  if not isinstance(scale, int | float | np.number | np.ndarray):
    raise ValueError(f"scale: expected a number or None, got {scale!r}")
  if not math.isfinite(scale):
    raise ValueError(f"scale: expected a finite number, got {scale}")
  return scale


def scaled_query(
  query: Float[Array, "B T N H"], scale: float | Float[Array, ""] | None
) -> tuple[Float[Array, "B T N H"], float]:
  """Queries, and the factor of their logits as a Python number.

  Loops over tiles need a number. A traced factor is multiplied into the
  queries, and 1 is left. A scale of None is 1/√H.
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
  is_int = isinstance(value, int | np.integer) and not isinstance(value, bool)
  if not is_int or value < low:
    raise ValueError(
      f"{name}: expected an int of at least {low}, got {value!r}"
    )


def check_flag(name: str, value: bool) -> None:
  """Checks that an option is True or False.

  Raises:
    ValueError: it is not; text such as 'False' would count as true.
  """
  if not isinstance(value, bool | np.bool_):
    raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_choice(name: str, value: Any, choices: Any) -> None:
  """Checks that an option is one of a `Literal`, or of `Literal[…] | None`.

  Raises:
    ValueError: it is another.
  """
  (literal,) = _types(choices)
  may_be_none = literal is not choices
  if value not in get_args(literal) and not (value is None and may_be_none):
    known = ", ".join(get_args(literal))
    raise ValueError(
      f"{name}: expected {'None or ' * may_be_none}one of {known}, got {value!r}"
    )


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


Check = Callable[[str, Any, Mapping[str, int], Mapping[str, Any]], Any]
"""`(name, value, letter -> size, argument -> value)`; raises ValueError."""


def _pairs(sizes: Mapping[str, int]) -> tuple[int, int, int, int]:
  """B, N, T, S; there is no S where query and key are one sequence."""
  length = sizes["T"]
  return sizes["B"], sizes["N"], length, sizes.get("S", length)


CHECKS: Mapping[str, Check] = {
  "mask": lambda _, mask, sizes, __: check_mask(mask, _pairs(sizes)),
  "scale": lambda _, scale, *__: softmax_scale(scale, 1),
  "query_segment_ids": _check_segments,
  "key_segment_ids": _check_segments,
  "bias": lambda name, x, sizes, _: check_broadcast(name, x, _pairs(sizes)),
  "logits_soft_cap": lambda _, cap, *__: check_soft_cap(cap),
  "log_forget": _check_log_forget,
  "dropout_rate": lambda _, rate, __, given: check_dropout(
    rate, given.get("dropout_rng")
  ),
}
"""Option -> what is asked of it in every function that takes it."""

_MAY_BE_ZERO = ("shift",)

TYPES: Mapping[tuple[Any, ...], Check] = {
  (bool,): lambda name, flag, *_: check_flag(name, flag),
  (int,): lambda name, count, *_: check_at_least(
    name, count, 0 if name in _MAY_BE_ZERO else 1
  ),
  (int, tuple[int, int]): lambda _, size, *__: block_sizes(size),
}
"""Types of an annotation but None -> what is asked of such an option."""


def applied(
  name: str,
  function: Callable[..., Any],
  own: Callable[[plug.Variables], Mapping[str, Any]] = lambda variables: {},
) -> Callable[..., Any]:
  """The `apply` of a record whose function takes query, key and value.

  Args:
    name: the mechanism, for messages.
    function: the attention function.
    own: variables -> the options of `function` that the record gives it, and a
      call may therefore not have.
  """

  def apply(variables, query, key, value, **call):
    call = accepted_options(name, function, call)
    given = own(variables)
    for option in given.keys() & call.keys():
      raise ValueError(_has_its_own(option, name))
    return function(query, key, value, **given, **call)

  return apply


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

  Raises:
    ValueError: `function` does not take an option that asks for something, no
      mechanism takes it, or the record gives it already.
  """
  known = inspect.signature(function).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
  accepted = {}
  for option, asked in options.items():
    if option in own:
      raise ValueError(_has_its_own(option, name))
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


def _has_its_own(option: str, name: str) -> str:
  """Why a call of a record may not have an option."""
  instead = f"call {name}_attention to give another"
  if option in _hyperparameters(name):
    instead = f"pass it to {name}({option}=…), which makes the record"
  return (
    f"{option}: the record of {name} attention has its own, expected none; "
    f"{instead}"
  )


def near(got: str, known: Iterable[str]) -> str:
  """The text "; did you mean 'b'?", or nothing where no name is like it."""
  found = difflib.get_close_matches(got, list(known), n=1)
  return f"; did you mean {found[0]!r}?" if found else ""


def _hyperparameters(name: str) -> Collection[str]:
  """Names of what the factory of a registered mechanism takes."""
  factory = _mechanisms.get(name)
  return () if factory is None else inspect.signature(factory).parameters


def _refuse(
  given: Mapping[str, Any],
  name: str,
  parameters: Mapping[str, inspect.Parameter],
  instead: Mapping[str, str],
) -> None:
  """Raises for an option that a function does not take, or needs."""
  # What only Flax passes tells more than what other mechanisms take.
  for option in sorted(given, key=lambda option: option not in _FLAX):
    if option not in parameters:
      hint = instead.get(option) or _hint(option, name, parameters)
      raise ValueError(f"{option}: {name} has no such option; {hint}")
  for option, parameter in parameters.items():
    if parameter.default is parameter.empty and option not in given:
      ways = [text for text in instead.values() if f"{option}=" in text]
      hint = f"; {ways[0]}" if ways else ""
      raise ValueError(f"{option}: {name} needs it, got nothing{hint}")


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
  if option in _hyperparameters(mechanism):
    return f"give it when the mechanism is made: {mechanism}({option}=…)"
  if option in plug.CALL_OPTIONS:
    having = plug.supporting(_mechanisms, plug.CALL_OPTIONS[option])
  else:
    having = [n for n, parameters in _functions.items() if option in parameters]
  having = having or [
    f"{n}({option}=…)" for n in _mechanisms if option in _hyperparameters(n)
  ]
  if having:
    *others, last = having
    return (
      f"{', '.join(others)} and {last} have it" if others else f"{last} has it"
    )
  names = [
    n
    for n, p in known.items()
    if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
  ]
  return f"it takes {', '.join(names)}{near(option, names)}"
