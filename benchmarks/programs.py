"""Programs that benchmarks measure: forward, with gradients, and decoding."""

from collections.abc import Callable, Iterable, Iterator, Sequence
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from attention import ATTENTIONS, Attention, Dims, gates_from_keys
from attention import mechanism as mechanisms
from settings.errors import ConfigError

BASELINE = "jax.nn.dot_product_attention"
DENSE = "dense"
FORWARD, TRAINING, DECODE = PARTS = ("forward", "forward+backward", "decode")


class Size(NamedTuple):
  """The sizes that all programs share; N = K."""

  batch: int = 1
  heads: int = 8
  head_dim: int = 64
  dtype: str = "float32"


@dataclasses.dataclass(eq=False)
class Program:
  """One program and its arguments.

  Attributes:
    mechanism: a name that `make` accepts.
    causal: whether the form is causal.
    part: one of `PARTS`.
    length: T = S; for decoding, the length of the cache.
    function: the function to compile.
    arguments: its arguments. The first one of a decoder is its cache, which is
      donated and returned as the second result.
    compiled: the compiled program, after `compile`.
    compile_seconds: the seconds of `compile`, including tracing.
    repeats: the number of calls that `seconds` times together.
  """

  mechanism: str
  causal: bool
  part: str
  length: int
  function: Callable[..., Any]
  arguments: Sequence[Any]
  compiled: Any = None
  compile_seconds: float = 0.0
  repeats: int = 1

  def compile(self) -> None:
    """Compiles the program once."""
    start = time.perf_counter()
    donated = (0,) if self.part == DECODE else ()
    jitted = jax.jit(self.function, donate_argnums=donated)
    self.compiled = jitted.lower(*self.arguments).compile()
    self.compile_seconds = time.perf_counter() - start

  @property
  def temp_bytes(self) -> int:
    """Bytes that XLA reserves in addition to arguments and results."""
    return self.compiled.memory_analysis().temp_size_in_bytes

  @property
  def needed_bytes(self) -> int:
    """Bytes of temporaries, arguments and results together."""
    sizes = self.compiled.memory_analysis()
    return (
      sizes.temp_size_in_bytes
      + sizes.argument_size_in_bytes
      + sizes.output_size_in_bytes
      - sizes.alias_size_in_bytes
    )

  def seconds(self) -> float:
    """Returns the seconds per call, over `repeats` calls."""
    result = None
    start = time.perf_counter()
    for _ in range(self.repeats):
      result = self.compiled(*self.arguments)
      if self.part == DECODE:
        self.arguments = [result[1], *self.arguments[1:]]
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / self.repeats


def select(names: Sequence[str]) -> Sequence[str]:
  """Returns the names that --attention lists, with 'all' expanded.

  Raises:
    ConfigError: a mechanism or its implementation does not exist.
  """
  names = [
    x for name in names for x in (ATTENTIONS if name == "all" else [name])
  ]
  for name in names:
    try:
      mechanisms.find(name.partition("/")[0])
      make(name, 256)
    except ValueError as error:
      raise ConfigError(f"--attention: {error}") from error
  return names


def programs(
  names: Iterable[str], size: Size, length: int
) -> Iterator[Program]:
  """Yields every program of these mechanisms at one length.

  Gradients are those of query, key, value and trainable variables, with the
  output as cotangent. A decoder writes and reads the last position of a cache of
  `length` positions. The cache is zero, since times do not depend on the values.

  Args:
    names: names that `make` accepts.
    size: the sizes of the arrays.
    length: T = S.
  """
  features = size.heads * size.head_dim
  dims = Dims(size.heads, size.heads, size.head_dim, length, features)
  shape = (size.batch, length, size.heads, size.head_dim)
  keys = jax.random.split(jax.random.key(0), 3)
  qkv = [jax.random.normal(key, shape, jnp.dtype(size.dtype)) for key in keys]
  # Wait for the arrays, so that drawing does not slow down compilation.
  jax.block_until_ready(qkv)
  for name in names:
    mechanism = make(name, length)
    variables = dict(mechanism.init(jax.random.key(1), dims))
    params = variables.pop("params", {})
    arrays: list[Any] = list(qkv)
    if "shared_qk" in mechanism.supports:
      arrays[1] = None
    for causal in mechanisms.directions(mechanism):
      forward = _forward(mechanism, causal)
      arguments = [params, *arrays, variables]
      for part, function in (
        (FORWARD, forward),
        (TRAINING, _forward_backward(forward)),
      ):
        yield Program(name, causal, part, length, function, arguments)
    if mechanism.init_cache and "decode" in mechanism.supports:
      variables = {"params": params, **variables}
      cache = mechanism.init_cache(
        variables, size.batch, length, dims, jnp.dtype(size.dtype)
      )
      rows = [None if x is None else x[:, -1:] for x in arrays]
      if "own_keys" in mechanism.supports:
        rows[2] = None
      # Arrays of a cache may share a buffer, which cannot be donated twice.
      cache = jax.tree.map(jnp.copy, _cache_at_end(cache, length))
      arguments = [cache, *rows, variables]
      function = _decode(mechanism, length)
      yield Program(name, True, DECODE, length, function, arguments)


def make(name: str, length: int, **hyperparameters: Any) -> Attention:
  """Returns a mechanism with comparable sizes: up to 256 keys, features or rows.

  Its gates, if any, are computed from the keys.

  Args:
    name: key of `ATTENTIONS`, import path, or `BASELINE`; 'flash/cudnn' is 'flash'
      with that implementation.
    length: T = S.
    **hyperparameters: override the mechanism's hyperparameters for benchmarks.
  """
  if name == BASELINE:
    return ATTENTIONS[DENSE]()._replace(
      apply=lambda variables, *qkv, **call: jax.nn.dot_product_attention(
        *qkv, **call
      ),
      init_cache=None,
      decode=None,
    )
  name, _, implementation = name.partition("/")
  if implementation:
    hyperparameters["implementation"] = implementation
  timed = mechanisms.example(name).sizes.timed(length)
  return gates_from_keys(mechanisms.build(name, {**timed, **hyperparameters}))


def _forward(mechanism: Attention, causal: bool) -> Callable[..., Any]:
  def forward(params, query, key, value, constants):
    variables = {"params": params, **constants}
    return mechanism.apply(variables, query, key, value, is_causal=causal)

  return forward


def gradients(function: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a function that computes gradients, with the output as cotangent."""

  def forward_backward(*arrays):
    out, pullback = jax.vjp(function, *arrays)
    return pullback(out)

  return forward_backward


def first_line(error: Exception) -> str:
  """Returns the first line of an error, since compilers write pages."""
  return str(error).strip().partition("\n")[0]


def _forward_backward(forward: Callable[..., Any]) -> Callable[..., Any]:
  def forward_backward(*arguments):
    *arrays, constants = arguments
    return gradients(lambda *x: forward(*x, constants))(*arrays)

  return forward_backward


def _decode(mechanism: Attention, length: int) -> Callable[..., Any]:
  assert mechanism.decode is not None
  decode = mechanism.decode

  def step(cache, query, key, value, variables):
    out, cache = decode(variables, cache, query, key, value)
    # The next call decodes the same position.
    return out, _cache_at_end(cache, length)

  return step


def _cache_at_end(cache: Any, length: int) -> Any:
  """Sets a cache to its last position, if it has an index."""
  if "index" not in getattr(cache, "_fields", ()):
    return cache
  return cache._replace(index=jnp.full_like(cache.index, length - 1))
