"""What the signature of a function says of its calls: decorators that check them."""

from collections.abc import Callable, Mapping, Sequence
import functools
import inspect
import re
import types
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
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import AbstractArray, Array

from attention import arguments, plug
from attention.platform import programs
from attention.softmax.cache import bounded
from attention.unknown_names import has_arrays

P = ParamSpec("P")
R = TypeVar("R")

_ARRAY = (AbstractArray, jax.Array)

_FROM_ZERO = ("shift", "shared_dim", "num_random")

TYPES: Mapping[tuple[Any, ...], arguments.Check] = {
  (bool,): lambda name, flag, *_: arguments.check_flag(name, flag),
  (float,): lambda name, number, *_: arguments.check_number(name, number),
  (int,): lambda name, count, *_: arguments.check_at_least(
    name, count, int(name not in _FROM_ZERO)
  ),
  (int, tuple[int, int]): lambda _, size, *__: arguments.block_sizes(size),
}
"""Types of an annotation but None -> what is asked of such an option."""


def attention_function(
  **instead: str,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
  """Decorates a public attention function, and checks all its calls.

  A call is refused that has an option the function does not take, lacks one that
  it needs, gives an option by position, or has a value that does not fit: an array
  by its annotation, an option by its name (`arguments.CHECKS`) or its type (`TYPES`).
  An option of another mechanism that is None, False or a zero rate asks for nothing,
  and is dropped.

  Args:
    **instead: hyperparameter of the mechanism that the function does not take
      -> what to give the function in its place.

  Returns:
    The decorator. Annotations and docstring stay as they are.
  """

  def decorate(function: Callable[P, R]) -> Callable[P, R]:
    name = getattr(function, "__name__", "attention")
    signature = inspect.signature(function)
    parameters = signature.parameters
    plug.FUNCTIONS[name] = parameters
    positional = [
      n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY
    ]
    needed = {n for n, p in parameters.items() if p.default is p.empty}
    defaults = {n: p.default for n, p in parameters.items() if n not in needed}
    arrays, checks = _by_annotation(parameters)
    static = {n for n, p in parameters.items() if _is_static(p.annotation)}

    def promoting(**given: Any) -> Any:
      if len({given[n].dtype for n in positional}) > 1:
        return _call_promoted(function, positional, **given)
      return cast(Any, function)(**given)

    program = programs.compiled_once(promoting)

    @functools.wraps(function)
    def checked(*args: P.args, **options: P.kwargs) -> R:
      if len(args) > len(positional):
        raise ValueError(
          f"{name}: expected {', '.join(positional)} by position and options "
          f"by name, got {len(args)} values by position"
        )
      given: dict[str, Any] = dict(zip(positional, args, strict=False))
      given |= options
      if not needed <= given.keys() <= parameters.keys():
        given = _taken(given, name, parameters, instead)
      for option in static & given.keys():
        arguments.check_static(option, given[option])
      asked = {n: checks[n] for n in given if n in checks}
      arguments.check_call({**defaults, **given}, arrays, asked, needed)
      query = given[positional[0]]
      if jax.typeof(query).sharding.mesh.explicit_axes:
        return call_with_auto_axes(promoting, query, (), given)
      return program(**given)

    # As it is written, where `help` would show jaxtyping's classes.
    written = signature.replace(
      parameters=[
        p.replace(annotation=_written(p.annotation))
        for p in parameters.values()
      ],
      return_annotation=_written(signature.return_annotation),
    )
    setattr(checked, "__signature__", written)  # noqa: B010
    return checked

  return decorate


def attention_factory(
  factory: Callable[P, plug.Attention],
) -> Callable[P, plug.Attention]:
  """Decorates a mechanism's factory: registers it, and checks its hyperparameters.

  Each is checked by its name (`arguments.CHECKS`) or its type (`TYPES`), and arrays are
  refused: they are for the attention function. So is an option that it has not. In
  its record, what it cannot do is a function that says so.
  """
  name = getattr(factory, "__name__", "factory")
  signature = inspect.signature(factory)
  _, checks = _by_annotation(signature.parameters)
  optional = {
    option
    for option, p in signature.parameters.items()
    if type(None) in get_args(p.annotation)
  }

  @functools.wraps(factory)
  def checked(*args: P.args, **options: P.kwargs) -> plug.Attention:
    for option in options:
      if option in ("query", "key", "value"):
        raise ValueError(has_arrays(option, name))
      if option not in signature.parameters:
        raise ValueError(
          plug.no_hyperparameter(option, name, signature.parameters)
        )
    given = signature.bind_partial(
      *args[: len(signature.parameters)], **options
    )
    for option, value in given.arguments.items():
      arguments.check_static(option, value)
      if hasattr(value, "ndim") and value.ndim:
        raise ValueError(has_arrays(option, name))
      if option in checks and not (value is None and option in optional):
        checks[option](option, value, {}, given.arguments)
    try:
      hash((args, tuple(options.values())))
    except TypeError:
      return made.__wrapped__(*args, **options)
    return made(*args, **options)

  # Programs are kept by function, so equal hyperparameters have one record.
  @functools.lru_cache(maxsize=programs.MOST, typed=True)
  def made(*args: Any, **options: Any) -> plug.Attention:
    record: plug.Attention = cast(Any, factory)(*args, **options)
    if not any(map(callable, [*args, *options.values()])):
      record = _compiled(record)
    return _with_refusals(name, bounded(record))

  plug.MECHANISMS[name] = checked
  return checked


_DECODING = "decode", "cannot decode token by token"
_LACKING = {
  "init_cache": _DECODING,
  "decode": _DECODING,
  "apply_sharded": ("sequence", "has no form for a sequence in parts"),
}
"""Function of a record -> what its `supports` says of it, and what lacks without it."""


def _compiled(record: plug.Attention) -> plug.Attention:
  """The record, whose eager calls are compiled once."""
  fields = "apply", "decode", "prefill", "apply_sharded", "loss"
  given = {x: getattr(record, x) for x in fields if getattr(record, x)}
  compiled: dict[str, Any] = {
    field: programs.compiled_once(function) for field, function in given.items()
  }
  return record._replace(**compiled)


def _with_refusals(name: str, record: plug.Attention) -> plug.Attention:
  """The record, with functions that say so in the place of those that it lacks."""

  def refusal(field):
    def refuse(*args, **options):
      del args, options
      capability, fault = _LACKING[field]
      raise ValueError(
        f"{field}: {name} {fault}; take a mechanism whose `supports` has "
        f"{capability!r}"
      )

    return refuse

  lacking = [field for field in _LACKING if getattr(record, field) is None]
  refused: dict[str, Any] = {field: refusal(field) for field in lacking}
  return record._replace(**refused)


def _by_annotation(
  parameters: Mapping[str, inspect.Parameter],
) -> tuple[dict[str, Any], dict[str, arguments.Check]]:
  """The annotations of arrays, and the checks of all else, by name or type."""
  arrays, checks = {}, dict(arguments.CHECKS)
  for option, parameter in parameters.items():
    allowed = _union_members(parameter.annotation)
    if allowed in TYPES:
      checks.setdefault(option, TYPES[allowed])
    elif get_origin(allowed[0]) is Literal:
      checks[option] = _among(allowed[0], parameter.annotation)
    elif all(isinstance(x, type) and issubclass(x, _ARRAY) for x in allowed):
      (arrays[option],) = allowed
      letters = arguments.TABLES.get(option)
      if letters and arrays[option].dim_str != letters:
        del checks[option]  # Of another form.
  return arrays, checks


def _union_members(annotation: Any) -> tuple[Any, ...]:
  """The types of a union, without None."""
  if get_origin(annotation) not in (types.UnionType, Union):
    return (annotation,)
  return tuple(x for x in get_args(annotation) if x is not type(None))


def _is_static(annotation: Any) -> bool:
  """Whether an option is made of Python values alone, which make the program."""
  members = _union_members(annotation)
  if get_origin(annotation) in (tuple, Sequence):
    members = get_args(annotation)
  if members == (annotation,):
    return annotation in (bool, int, float, str) or (
      get_origin(annotation) is Literal
    )
  return all(map(_is_static, members))


def _among(literal: Any, annotation: Any) -> arguments.Check:
  """The check of a `Literal`, or of `Literal[…] | None`."""
  words, may_be_none = get_args(literal), literal is not annotation
  return lambda name, value, *_: arguments.check_choice(
    name, value, words, may_be_none
  )


def promoted(*arrays: Array) -> list[Array]:
  """The arrays in one dtype, the one in which jnp computes with all of them."""
  return [x.astype(jnp.result_type(*arrays)) for x in arrays]


def _call_promoted(function, positional, **given):
  """A call on `promoted` arrays; the result has the dtype of the query."""
  arrays = [given.pop(name) for name in positional]
  results = function(*promoted(*arrays), **given)
  if not isinstance(results, tuple):
    return results.astype(arrays[0].dtype)
  return results[0].astype(arrays[0].dtype), *results[1:]


class _Written(str):
  """An annotation that shows as its text."""

  __repr__ = str.__str__


def _written(annotation: Any) -> _Written:
  """An annotation without the names of modules: Float[Array, 'B T N H']."""
  text = inspect.formatannotation(annotation)
  return _Written(re.sub(r"(?:\w+\.)+(?=\w)", "", text))


def _taken(
  given: Mapping[str, Any],
  name: str,
  parameters: Mapping[str, inspect.Parameter],
  instead: Mapping[str, str],
) -> dict[str, Any]:
  """What a function takes of a call that asks for nothing else.

  Raises:
    ValueError: there is an option that it does not take, or one that it needs lacks.
  """
  given = {
    option: value
    for option, value in given.items()
    if option in parameters or not plug.asks_for_nothing(option, value)
  }
  # What only Flax passes tells more than what other mechanisms take.
  for option in sorted(
    given, key=lambda option: option not in plug.FLAX_OPTIONS
  ):
    if option not in parameters:
      hint = instead.get(option) or plug.hint(option, name, parameters)
      raise ValueError(f"{option}: {name} has no such option; {hint}")
  for option, parameter in parameters.items():
    if parameter.default is parameter.empty and option not in given:
      ways = [text for text in instead.values() if f"{option}=" in text]
      hint = f"; {ways[0]}" if ways else ""
      raise ValueError(f"{option}: {name} needs it, got nothing{hint}")
  return given


def call_with_auto_axes(
  function: Callable[..., Any],
  query: Any,
  args: tuple[Any, ...],
  options: Mapping[str, Any],
) -> Any:
  """`function(*args, **options)`, inside of which no axis of the query's is explicit.

  There the compiler chooses shardings, as on other meshes. Results are sharded as the
  query is: `[B, T, N, …]` along these axes, and all else along B.
  """
  mesh = jax.typeof(query).sharding.mesh
  if not mesh.explicit_axes:
    return function(*args, **options)
  auto = dict.fromkeys(mesh.explicit_axes, AxisType.Auto)
  leaves, structure = jax.tree.flatten((args, dict(options)))
  with jax.sharding.use_abstract_mesh(mesh.update_axis_types(auto)):
    leaves = [
      jax.sharding.reshard(x, PartitionSpec())
      if isinstance(x, jax.Array)
      else x
      for x in leaves
    ]
    args, options = structure.unflatten(leaves)
    results = function(*args, **options)
  batch, length, heads, _ = jax.typeof(query).sharding.spec

  def placed(x):
    is_alike = x.shape[:3] == query.shape[:3]
    spec = (batch, length, heads) if is_alike else (batch,)
    return jax.sharding.reshard(x, PartitionSpec(*spec))

  return jax.tree.map(placed, results)
