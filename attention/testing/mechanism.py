"""A mechanism as the contract sees it, and the laws that it is held to."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attention import plug
from attention.gates import gates_from_keys
from attention.testing.calls import Case, require


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
  """A factory with hyperparameters, its definition, and what cannot be read.

  The arguments are those of `check_mechanism`, which describes them.
  """

  factory: Callable[..., plug.Attention]
  definition: Callable[..., Any]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  normalised: bool = True
  sparse: bool = False
  pads: bool = True
  past_error: float = 0.0
  bounded: bool = True
  cache: Literal["length", "nothing"] | None = None
  _made: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False)

  def __str__(self) -> str:
    return ",".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

  @property
  def name(self) -> str:
    """The name of the factory."""
    return getattr(self.factory, "__name__", str(self.factory))

  @functools.cached_property
  def record(self) -> plug.Attention:
    """What the factory returns; its gates, if it has any, read its keys."""
    return gates_from_keys(self.factory(**self.options))

  @property
  def supports(self) -> frozenset[str]:
    """What the record claims."""
    return self.record.supports

  @property
  def directions(self) -> tuple[bool, ...]:
    """The values of `is_causal` that it takes."""
    return plug.directions(self.record)

  @property
  def shares_query_and_key(self) -> bool:
    """Whether query and key are one array, which `draw` gives once."""
    return "shared_qk" in self.supports

  def apply(self, variables: plug.Variables, qkv: Any, **call: Any) -> Any:
    """The call on arrays as `draw` gives them, causal where it has to be."""
    return self.record.apply(variables, *self._three(qkv), **self._call(call))

  def init_cache(self, *sizes: Any) -> Any:
    """An empty cache, from variables, B, max_length, dims and dtype."""
    return self._decoder("init_cache")(*sizes)

  def decode(
    self, variables: plug.Variables, cache: Any, qkv: Any, **call: Any
  ) -> Any:
    """The decoding of one position, or of several one after another."""
    three = self._three(qkv)
    return self._decoder("decode")(variables, cache, *three, **call)

  def prefill(
    self, variables: plug.Variables, cache: Any, qkv: Any, lengths: Any
  ) -> Any:
    """The cache after a whole prompt."""
    three = self._three(qkv)
    return self._decoder("prefill")(variables, cache, *three, lengths)

  def _decoder(self, name: str) -> Callable[..., Any]:
    function = getattr(self.record, name)
    require(function, f"`supports` names 'decode', but {name} is None")
    return function

  def _three(self, qkv: Any) -> tuple[Any, Any, Any]:
    """Query, key and value, None for what `draw` leaves out."""
    if self.shares_query_and_key:
      return qkv[0], None, qkv[1]
    query, key, *value = qkv
    return query, key, value[0] if value else None

  def _call(self, call: dict[str, Any]) -> dict[str, Any]:
    return {"is_causal": True, **call} if self.record.causal_only else call

  def variables(self, dims: plug.Dims) -> plug.Variables:
    """The variables that `init` draws, once for each `dims`."""
    return _variables(self, dims)

  def draw(
    self, case: Case, seed: int = 0, *, cached: bool = False
  ) -> tuple[list, dict[str, Any]]:
    """`case.draw`, without the key where the query is the key.

    Without the value, too, if `cached`, where a mechanism makes its own: a cache
    has no place for others.
    """
    arrays, call = case.draw(seed)
    if cached and "own_keys" in self.supports:
      return arrays[:2], call
    return arrays[:: 2 if self.shares_query_and_key else 1], call

  def draw_masked(
    self, length: int = 13, seed: int = 0, *, hides: bool = True
  ) -> tuple[list, dict[str, Any]]:
    """Arrays, a mask of keys and one segment, as far as it takes them.

    The mask hides some keys, or none; the batch is 8.
    """
    case = Case(("mask", "segments"), length=length, batch=8)
    arrays, call = self.draw(case.limited(self.supports), seed)
    for ids in {"query_segment_ids", "key_segment_ids"} & call.keys():
      call[ids] = np.zeros((8, length), np.int32)
    if "mask" in call and not hides:
      call["mask"] = np.ones_like(call["mask"])
    return arrays, call

  def define(self, variables: plug.Variables, qkv: Any, **call: Any) -> Any:
    """The definition's result on arrays in float64, checked to be float64."""
    tree = in_float64((variables, list(qkv), self._call(call)))
    variables, qkv, call = tree
    out = self.definition(variables, *qkv, **call)
    require(
      isinstance(out, np.ndarray) and out.dtype == np.float64,
      f"definition: expected a float64 NumPy array, got {type(out).__name__} "
      f"{getattr(out, 'dtype', '')}; compute it with numpy, not with jax.numpy",
    )
    return out


def in_float64(tree: Any) -> Any:
  """Floating-point arrays as float64 NumPy arrays, all else as it is."""

  def converted(x):
    is_array = isinstance(x, np.ndarray | jax.Array)
    is_floating = is_array and jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if is_floating else x

  return jax.tree.map(converted, tree)


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
  """Makes `make(mechanism, *args)` once for each mechanism and arguments.

  Compiling takes most of the contract's time, so laws share programs.
  """

  @functools.wraps(make)
  def made(mechanism, *args):
    key = (make, *args)
    if key not in mechanism._made:
      mechanism._made[key] = make(mechanism, *args)
    return mechanism._made[key]

  return made


@shared
def _variables(mechanism, dims):
  # One program, where eager JAX would compile one for each operation.
  return jax.jit(lambda key: mechanism.record.init(key, dims))(
    jax.random.key(0)
  )


def directed(mechanism: Mechanism, is_causal: bool) -> Callable[..., Any]:
  """The call `(variables, qkv, call) -> out` in one direction."""

  def apply(variables, qkv, call):
    return mechanism.apply(variables, qkv, is_causal=is_causal, **call)

  return apply


@shared
def forward(mechanism: Mechanism, is_causal: bool) -> Callable[..., Any]:
  """The compiled call `(qkv, call) -> out`."""
  run = jax.jit(directed(mechanism, is_causal))
  return functools.partial(run, mechanism.variables(Case().dims))


@shared
def backward(
  mechanism: Mechanism, is_causal: bool
) -> tuple[Callable[..., Any], list]:
  """The compiled `(qkv, call, cotangent) -> out, gradients`, and its traces.

  Without a cotangent it is all ones.
  """
  apply, traces = directed(mechanism, is_causal), []

  @jax.jit
  def run(variables, qkv, call, cotangent):
    traces.append(None)
    out, pullback = jax.vjp(lambda qkv: apply(variables, qkv, call), qkv)
    return out, pullback(cotangent)[0]

  variables = mechanism.variables(Case().dims)

  def call_and_gradient(qkv, call, cotangent=None):
    if cotangent is None:
      cotangent = np.ones(qkv[0].shape, np.float32)
    return run(variables, qkv, call, cotangent)

  return call_and_gradient, traces


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
  """A law of the contract.

  Attributes:
    name: the law, and in brackets the call that it is checked on.
    law: `(mechanism) -> None`, raises AssertionError where it does not hold. Its
      docstring is the advice.
    needs: capabilities of the mechanisms that the law is about.
    where: a further condition.
    every_setting: whether it depends on the hyperparameters of a mechanism, so
      that a suite with several settings of one checks each of them.
    bits: whether the law is about bits, and so needs the optimisation by XLA
      that users have.
  """

  name: str
  law: Callable[[Mechanism], None]
  needs: frozenset[str] = frozenset()
  where: Callable[[Mechanism], bool] = lambda mechanism: True
  every_setting: bool = True
  bits: bool = False

  def __str__(self) -> str:
    return self.name

  @property
  def advice(self) -> str:
    """What must hold, and what to do where it does not."""
    law = getattr(self.law, "func", self.law)
    return " ".join(str(law.__doc__).split())

  def applies(self, mechanism: Mechanism) -> bool:
    """Whether the law is about `mechanism`."""
    return self.needs <= mechanism.supports and self.where(mechanism)

  def __call__(self, mechanism: Mechanism) -> None:
    """Checks a mechanism, without silent broadcasting of ranks.

    Raises:
      AssertionError: the law does not hold.
    """
    with jax.numpy_rank_promotion("raise"):
      self.law(mechanism)


def law(*needs: str, **facts: Any) -> Callable[..., Check]:
  """Makes a function a check of its name, for mechanisms that support `needs`."""

  def decorate(function):
    return Check(function.__name__, function, frozenset(needs), **facts)

  return decorate


def in_each_direction(
  check: Callable[[Mechanism, bool], None],
) -> Callable[[Mechanism], None]:
  """The law with `is_causal` False and True, as far as a mechanism takes it."""

  @functools.wraps(check)
  def both(mechanism):
    for is_causal in mechanism.directions:
      try:
        check(mechanism, is_causal)
      except AssertionError as error:
        message = f"with is_causal={is_causal}, {error}"
        raise AssertionError(message) from error

  return both
