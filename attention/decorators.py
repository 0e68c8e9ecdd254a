"""The decorators of attention functions and of mechanism factories.

A decorated function checks the arguments of a call, builds `visible` and `logits` from
the keywords that several functions share, and runs an eager call as one program. A
decorated factory checks its hyperparameters and is added to `ATTENTIONS`.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
import functools
import inspect
import re
from types import UnionType
from typing import (
  Any,
  Literal,
  ParamSpec,
  TypeVar,
  Union,
  cast,
  get_args,
  get_origin,
)

import jax
import jax.numpy as jnp
from jaxtyping import AbstractArray, Array, Int
import numpy as np

from attention import checks
from attention.checks import Check, FromZero
from attention.mechanism import FACTORIES, Attention, Variables, reserved_option
from attention.names import unknown_option
from attention.platform import programs
from attention.softmax.logits import logits_from_options
from attention.softmax.visible import SEEN, visible_from_options

P = ParamSpec("P")
R = TypeVar("R")


def attention_function(function: Callable[P, R]) -> Callable[P, R]:
  """Decorates a public attention function, so that it checks its calls.

  A call raises ValueError if an option is unknown, missing, invalid or given by
  position. Arrays are checked against their annotations, options by name
  (`checks.CHECKS`) or by type. An eager call runs as one program
  (`programs.cached_jit`).

  The keywords in `**pairs: Unpack[…]` become keywords of the decorated function. If the
  function has the options `visible` and `logits`, these replace the keywords when it is
  called. Other annotations and the docstring do not change.
  """
  name = getattr(function, "__name__", "attention")
  signature = inspect.signature(function)
  parameters, shared = _expand_shared_options(signature.parameters)
  visible_names, logits_names = [], []
  if shared and "visible" in signature.parameters:
    visible_names = ["visible", *(n for n in parameters if n in shared & SEEN)]
  if shared and "logits" in signature.parameters:
    logits_names = ["logits", *(n for n in parameters if n in shared - SEEN)]
  positional = [
    n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY
  ]
  required = {n for n, p in parameters.items() if p.default is p.empty}
  defaults = {n: p.default for n, p in parameters.items() if n not in required}
  arrays, option_checks = _checks_by_annotation(parameters)
  static = {n for n, p in parameters.items() if _is_static(p.annotation)}

  def run(**given: Any) -> Any:
    qkv = [given.pop(n) for n in positional]
    dtype = qkv[0].dtype
    is_mixed = any(x.dtype != dtype for x in qkv)
    if is_mixed:
      qkv = programs.promote(*qkv)
    if visible_names:
      pairs = {n: given.pop(n) for n in visible_names if n in given}
      given["visible"] = visible_from_options(
        qkv[0], qkv[1], **pairs, axis_name=given.get("axis_name")
      )
    if logits_names:
      pairs = {n: given.pop(n) for n in logits_names if n in given}
      given["logits"] = logits_from_options(
        qkv[0], qkv[1], given["visible"], **pairs
      )
    results = cast(Any, function)(*qkv, **given)
    if not is_mixed:
      return results
    # The result has the dtype of the query.
    if not isinstance(results, tuple):
      return results.astype(dtype)
    return results[0].astype(dtype), *results[1:]

  program = programs.cached_jit(run)

  @functools.wraps(function)
  def checked(*args: P.args, **options: P.kwargs) -> R:
    if len(args) > len(positional):
      raise ValueError(
        f"{name}: expected {', '.join(positional)} by position and options "
        f"by name, got {len(args)} values by position"
      )
    given: dict[str, Any] = dict(zip(positional, args, strict=False))
    given |= options
    for option in given:
      if option not in parameters:
        raise ValueError(unknown_option(option, name, parameters))
      if option in static:
        checks.check_static(option, given[option])
    for option in parameters:
      if option in required and option not in given:
        raise ValueError(f"{option}: {name} needs it, got nothing")
    own_checks = {n: option_checks[n] for n in given if n in option_checks}
    checks.check_call({**defaults, **given}, arrays, own_checks, required)
    query = given[positional[0]]
    if jax.typeof(query).sharding.mesh.explicit_axes:
      return programs.call_with_auto_axes(run, query, (), given)
    return program(**given)

  # `help` shows these texts instead of jaxtyping's classes.
  shown = [
    p.replace(annotation=_annotation_text(p.annotation))
    for p in parameters.values()
  ]
  shown_signature = signature.replace(
    parameters=shown,
    return_annotation=_annotation_text(signature.return_annotation),
  )
  setattr(checked, "__signature__", shown_signature)  # noqa: B010
  return checked


def _expand_shared_options(
  parameters: Mapping[str, inspect.Parameter],
) -> tuple[Mapping[str, inspect.Parameter], AbstractSet[str]]:
  """All parameters, including the keywords in `**pairs: Unpack[…]`, and their names."""
  *own, last = parameters.values()
  if last.kind is not last.VAR_KEYWORD:
    return parameters, frozenset()
  (options,) = get_args(last.annotation)
  shared = [
    last.replace(
      name=name,
      kind=last.KEYWORD_ONLY,
      default=False if kind is bool else None,
      annotation=kind,
    )
    for name, kind in options.__annotations__.items()
  ]
  qkv = [p for p in own if p.kind is not p.KEYWORD_ONLY]
  others = [
    # The function always receives one.
    p.replace(default=None, annotation=p.annotation | None)
    if p.name in ("visible", "logits")
    else p
    for p in own[len(qkv) :]
  ]
  names = frozenset(options.__annotations__)
  return {p.name: p for p in [*qkv, *shared, *others]}, names


_TYPES: Mapping[tuple[Any, ...], Check] = {
  (bool,): lambda name, flag, *_: checks.check_flag(name, flag),
  (float,): lambda name, number, *_: checks.check_number(name, number),
  (int,): lambda name, count, *_: checks.check_at_least(name, count, 1),
  (FromZero,): lambda name, count, *_: checks.check_at_least(name, count, 0),
  (int, tuple[int, int]): lambda _, size, *__: checks.block_sizes(size),
}
"""Types in an annotation, without None -> the check of such an option."""

_ARRAY = (AbstractArray, jax.Array)


def _checks_by_annotation(
  parameters: Mapping[str, inspect.Parameter],
) -> tuple[dict[str, Any], dict[str, Check]]:
  """The annotations of array parameters, and the checks of the other options."""
  arrays, option_checks = {}, dict(checks.CHECKS)
  for option, parameter in parameters.items():
    allowed = _union_members(parameter.annotation)
    if allowed in _TYPES:
      option_checks.setdefault(option, _TYPES[allowed])
    elif get_origin(allowed[0]) is Literal:
      option_checks[option] = _choice_check(allowed[0], parameter.annotation)
    elif all(isinstance(x, type) and issubclass(x, _ARRAY) for x in allowed):
      (arrays[option],) = allowed
      letters = checks.TABLES.get(option)
      if letters and arrays[option].dim_str != letters:
        del option_checks[option]  # The table has another shape here.
  return arrays, option_checks


def _union_members(annotation: Any) -> tuple[Any, ...]:
  """The types of a union, without None."""
  if get_origin(annotation) not in (UnionType, Union):
    return (annotation,)
  return tuple(x for x in get_args(annotation) if x is not type(None))


def _is_static(annotation: Any) -> bool:
  """Whether an option is a Python value on which the compiled program depends."""
  members = _union_members(annotation)
  if get_origin(annotation) in (tuple, Sequence):
    members = get_args(annotation)
  if members == (annotation,):
    is_literal = get_origin(annotation) is Literal
    return is_literal or annotation in (bool, int, float, str, FromZero)
  return all(map(_is_static, members))


def _choice_check(literal: Any, annotation: Any) -> Check:
  """The check of a `Literal`, or of `Literal[…] | None`."""
  choices, may_be_none = get_args(literal), literal is not annotation
  return lambda name, value, *_: checks.check_choice(
    name, value, choices, may_be_none
  )


class _AnnotationText(str):
  """An annotation whose `repr` is its text."""

  __repr__ = str.__str__


def _annotation_text(annotation: Any) -> _AnnotationText:
  """The text of an annotation without module names: Float[Array, 'B T N H']."""
  text = inspect.formatannotation(annotation)
  return _AnnotationText(re.sub(r"(?:\w+\.)+(?=\w)", "", text))


def _python_value(value: Any) -> Any:
  return value.item() if isinstance(value, np.generic) else value


def attention_factory(
  factory: Callable[P, Attention],
) -> Callable[P, Attention]:
  """Decorates a mechanism's factory: registers it and checks its arguments.

  Each hyperparameter is checked by name (`checks.CHECKS`) or by type. An array raises
  ValueError, because it belongs in a call of the attention function. Equal
  hyperparameters give the same record, whose eager calls are compiled once.
  """
  name = getattr(factory, "__name__", "factory")
  parameters = inspect.signature(factory).parameters
  _, option_checks = _checks_by_annotation(parameters)

  def raise_for_array(option):
    raise ValueError(
      f"{option}: {name} creates a mechanism from hyperparameters, got an array; "
      f"call {name}(…).apply(variables, query, key, value, …)"
    )

  @functools.wraps(factory)
  def checked(*values: P.args, **named_values: P.kwargs) -> Attention:
    # NumPy's booleans are not Python's, which factories expect.
    args = tuple(map(_python_value, values))
    options = {n: _python_value(x) for n, x in named_values.items()}
    given = dict(zip(parameters, args, strict=False)) | options
    for option, value in given.items():
      if option in ("query", "key", "value") or getattr(value, "ndim", 0):
        raise_for_array(option)
      if option not in parameters:
        raise ValueError(unknown_option(option, name, parameters))
      checks.check_static(option, value)
      may_be_none = type(None) in get_args(parameters[option].annotation)
      if option in option_checks and not (value is None and may_be_none):
        option_checks[option](option, value, {}, given)
    try:
      hash((args, tuple(options.values())))
    except TypeError:
      return cached.__wrapped__(*args, **options)
    return cached(*args, **options)

  # Programs are cached by function, so equal hyperparameters share one record.
  @functools.lru_cache(maxsize=programs.MAX_PROGRAMS, typed=True)
  def cached(*args: Any, **options: Any) -> Attention:
    record: Attention = cast(Any, factory)(*args, **options)
    if any(map(callable, [*args, *options.values()])):
      return _with_cache_checks(record)
    fields = "apply", "decode", "prefill", "loss"
    functions = {x: getattr(record, x) for x in fields if getattr(record, x)}
    compiled = {x: programs.cached_jit(f) for x, f in functions.items()}
    return _with_cache_checks(cast(Any, record)._replace(**compiled))

  FACTORIES[name] = checked
  return checked


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
  """Builds a check that raises ValueError for options that `function` does not have."""
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


def _with_cache_checks(record: Attention) -> Attention:
  """Adds checks of the arguments of `decode` and `prefill`.

  They also raise if a growing cache is full. If the index is traced, `decode` returns
  NaN instead.
  """
  decode: Any = record.decode
  prefill: Any = record.prefill
  check_decode_options = decode and _cache_options_check("decode", decode)
  check_prefill_options = prefill and _cache_options_check("prefill", prefill)

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


def make_apply(
  name: str,
  function: Callable[..., Any],
  own: Callable[[Variables], Mapping[str, Any]] = lambda variables: {},
) -> Callable[..., Any]:
  """Builds the `apply` of a mechanism from its attention function.

  Args:
    name: the mechanism, for messages.
    function: the attention function, of query, key and value, which checks its calls.
    own: variables -> the options of `function` that the mechanism sets, and that a call
      must not have.
  """

  def apply(variables, query, key, value, **call):
    try:
      given = own(variables)
    except KeyError as error:
      raise ValueError(
        f"variables: {name} needs the variables of its init; {error} is missing"
      ) from error
    for option in sorted(given.keys() & call.keys()):
      raise ValueError(reserved_option(option, name))
    return function(query, key, value, **given, **call)

  return apply
