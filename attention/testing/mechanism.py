"""Mechanisms with their definitions, and the registry of checks."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attention.mechanism import Attention, Dims, Variables, directions
from attention.recurrent.gates import gates_from_keys
from attention.testing.calls import Case, require


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
  """A factory with hyperparameters, its definition, and its declared properties.

  `check_mechanism` documents the arguments.
  """

  factory: Callable[..., Attention]
  definition: Callable[..., Any]
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  normalised: bool = True
  sparse: bool = False
  pads: bool = True
  past_error: float = 0.0
  bounded: bool = True
  one_matrix: bool = True
  cache: Literal["length", "nothing"] | None = None

  def __str__(self) -> str:
    return ",".join([self.name, *(f"{k}={v}" for k, v in self.options.items())])

  @property
  def name(self) -> str:
    """The name of the factory."""
    return getattr(self.factory, "__name__", str(self.factory))

  @functools.cached_property
  def record(self) -> Attention:
    """The mechanism that the factory returns, with gates computed from its keys."""
    return gates_from_keys(self.factory(**self.options))

  @property
  def supports(self) -> frozenset[str]:
    """The capabilities of the mechanism."""
    return self.record.supports

  @property
  def directions(self) -> tuple[bool, ...]:
    """The values of `is_causal` that the mechanism supports."""
    return directions(self.record)

  @property
  def shares_query_and_key(self) -> bool:
    """Whether query and key are one array, which `draw` returns once."""
    return "shared_qk" in self.supports

  def three(self, qkv: Any) -> tuple[Any, Any, Any]:
    """Query, key and value, with None for arrays that `draw` does not return."""
    if self.shares_query_and_key:
      return qkv[0], None, qkv[1]
    query, key, value, *_ = (*qkv, None)
    return query, key, value

  def apply(self, variables: Variables, qkv: Any, **call: Any) -> Any:
    """Calls the mechanism with arrays of `draw`; causal if it supports nothing else."""
    return self.record.apply(variables, *self.three(qkv), **self._call(call))

  def _call(self, call: dict[str, Any]) -> dict[str, Any]:
    return {"is_causal": True, **call} if self.record.causal_only else call

  def decoder(self, name: str) -> Callable[..., Any]:
    """The function 'init_cache', 'decode' or 'prefill', which must exist."""
    function = getattr(self.record, name)
    require(function, f"`supports` names 'decode', but {name} is None")
    return function

  def variables(self, dims: Dims) -> Variables:
    """The variables of `init`, drawn once for each `dims`.

    Noise is added to trained variables that are constant, such as a bias of 0.
    """
    return _variables(self, dims)

  def limited(self, case: Case) -> Case:
    """Returns the case without what the mechanism does not support."""
    if not self.record.linear_in_values:
      case = case._replace(value_dim=case.head_dim)
    return case.limited(self.supports)

  def draw(self, case: Case, seed: int = 0) -> tuple[list, dict[str, Any]]:
    """`case.draw`, without a key if the query is the key."""
    arrays, call = case.draw(seed)
    return arrays[:: 2 if self.shares_query_and_key else 1], call

  def gates(self, qkv: Any) -> dict[str, Any]:
    """The gates, computed from the keys, as options of a call."""
    compute_gates = self.factory(**self.options).gates
    if compute_gates is None:
      return {}
    key = np.reshape(self.three(qkv)[1], (*qkv[0].shape[:2], -1))
    variables = self.variables(Case().dims)
    return jax.tree.map(np.asarray, jax.jit(compute_gates)(variables, key))

  def draw_masked(
    self, length: int = 13, seed: int = 0, *, hides: bool = True
  ) -> tuple[list, dict[str, Any]]:
    """Draws arrays, a key mask and a single segment, as far as they are supported.

    The mask excludes some keys, or none if `hides` is False. The batch size is 8.
    """
    case = Case(("mask", "segments"), length=length, batch=8)
    arrays, call = self.draw(self.limited(case), seed)
    for ids in sorted({"query_segment_ids", "key_segment_ids"} & call.keys()):
      call[ids] = np.zeros((8, length), np.int32)
    if "mask" in call and not hides:
      call["mask"] = np.ones_like(call["mask"])
    return arrays, call

  def define(self, variables: Variables, qkv: Any, **call: Any) -> Any:
    """Evaluates the definition in float64, and checks that its result is float64."""
    variables, qkv, call = in_float64((variables, list(qkv), self._call(call)))
    out = self.definition(variables, *qkv, **call)
    require(
      isinstance(out, np.ndarray) and out.dtype == np.float64,
      f"definition: expected a float64 NumPy array, got {type(out).__name__} "
      f"{getattr(out, 'dtype', '')}; compute it with numpy, not with jax.numpy",
    )
    return out


def in_float64(tree: Any) -> Any:
  """Converts floating-point arrays to float64 NumPy arrays, and nothing else."""

  def convert(x):
    is_array = isinstance(x, np.ndarray | jax.Array)
    is_floating = is_array and jnp.issubdtype(x.dtype, jnp.floating)
    return np.asarray(x, np.float64) if is_floating else x

  return jax.tree.map(convert, tree)


@functools.lru_cache(maxsize=16)
def _variables(mechanism, dims):
  # One program, whereas eager JAX would compile one per operation.
  variables = jax.jit(lambda key: mechanism.record.init(key, dims))(
    jax.random.key(0)
  )
  rng = np.random.default_rng(0)

  def add_noise(x):
    # A bias of 0 would hide a wrong sign, and a scale of 1 that it is not used.
    if np.ptp(x) > 0:
      return x
    noise = rng.normal(0.0, 0.3, x.shape)
    return jnp.asarray(x + noise, x.dtype)

  trained = {k: x for k, x in variables.items() if k != "constants"}
  return {**variables, **jax.tree.map(add_noise, trained)}


# Compilation takes most of the contract's time, so laws share programs.
@functools.lru_cache(maxsize=4)
def forward(mechanism: Mechanism, is_causal: bool) -> Callable[..., Any]:
  """The compiled call `(qkv, **call) -> out`."""
  run = jax.jit(functools.partial(mechanism.apply, is_causal=is_causal))
  return functools.partial(run, mechanism.variables(Case().dims))


def separate(mechanism: Mechanism, variables: Any, qkv: Any, call: Any) -> Any:
  """Splits a call into differentiable arrays, other arrays, and Python values.

  The first are all floating-point arrays except constants, as {'params', 'arrays',
  'options'}. `together` inverts this function.
  """
  names = ("query", "key", "value") if len(qkv) == 3 else ("query", "value")
  trained = {k: x for k, x in variables.items() if k != "constants"}
  trained |= {"arrays": dict(zip(names, qkv, strict=True)), "options": {}}
  others = {k: x for k, x in variables.items() if k == "constants"}
  others["fixed"], flags = {}, {}
  for name, x in call.items():
    dtype = getattr(jax.tree.leaves(x)[0], "dtype", None)
    is_floating = dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    static = flags if dtype is None else others["fixed"]
    (trained["options"] if is_floating else static)[name] = x
  return trained, others, tuple(flags.items())


def together(trained: Any, others: Any, flags: Any) -> tuple[Any, list, dict]:
  """Variables, arrays and options from the three parts of `separate`."""
  variables = {**trained, **others}
  arrays = variables.pop("arrays")
  call = {**variables.pop("options"), **variables.pop("fixed"), **dict(flags)}
  names = [x for x in ("query", "key", "value") if x in arrays]
  return variables, [arrays[x] for x in names], call


@functools.lru_cache(maxsize=2)
def vjp_program(mechanism: Mechanism) -> Callable[..., Any]:
  """The compiled `(*separate(…), cotangent) -> out, gradients`."""

  @functools.partial(jax.jit, static_argnums=2)
  def run(trained, others, flags, cotangent):
    def apply(trained):
      variables, qkv, call = together(trained, others, flags)
      return mechanism.apply(variables, qkv, **call)

    out, pullback = jax.vjp(apply, trained)
    return out, pullback(cotangent)[0]

  return run


def backward(
  mechanism: Mechanism,
  is_causal: bool,
  qkv: Any,
  call: dict[str, Any],
  cotangent: Any = None,
  dims: Dims | None = None,
) -> tuple[Any, list]:
  """The result, and the gradients of `qkv` for a cotangent, by default ones.

  The variables are those of `dims`, by default `Case().dims`.
  """
  if cotangent is None:
    cotangent = np.ones(qkv[0].shape, np.float32)
  if is_causal:
    call = {"is_causal": True, **call}
  variables = mechanism.variables(dims or Case().dims)
  trained, others, flags = separate(mechanism, variables, qkv, call)
  run = vjp_program(mechanism)
  out, gradient = run(trained, others, flags, cotangent)
  return out, together(gradient, others, ())[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
  """A law of the contract.

  Attributes:
    name: the name of the law, with the checked call in brackets.
    law: `(mechanism) -> None`; raises AssertionError if the law does not hold. Its
      docstring is the advice.
    needs: the capabilities that a mechanism needs for the law to apply.
    where: a further condition on the mechanism.
    every_setting: whether the law depends on hyperparameters, so that a suite with
      several settings of a mechanism should check each of them.
    bits: whether the law compares bits, and therefore needs the XLA optimisations of
      normal use.
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
    """The law in words, with advice in case of a failure."""
    law = getattr(self.law, "func", self.law)
    return " ".join(str(law.__doc__).split())

  def applies(self, mechanism: Mechanism) -> bool:
    """Whether the law applies to `mechanism`."""
    return self.needs <= mechanism.supports and self.where(mechanism)

  def __call__(self, mechanism: Mechanism) -> None:
    """Checks a mechanism, without implicit rank promotion.

    Raises:
      AssertionError: the law does not hold.
    """
    with jax.numpy_rank_promotion("raise"):
      self.law(mechanism)


LAWS: list[Check] = []
"""The contract; `law` and modules with parametrised laws append to it."""


def law(*needs: str, **facts: Any) -> Callable[..., Check]:
  """Registers a function as a check, for mechanisms that support `needs`.

  With each_direction=True, the function also gets `is_causal`, once for each value that
  the mechanism supports.
  """
  each_direction = facts.pop("each_direction", False)

  def decorate(function):
    @functools.wraps(function)
    def run_directions(mechanism):
      for is_causal in mechanism.directions:
        try:
          function(mechanism, is_causal)
        except AssertionError as error:
          message = f"with is_causal={is_causal}, {error}"
          raise AssertionError(message) from error

    run = run_directions if each_direction else function
    LAWS.append(Check(function.__name__, run, frozenset(needs), **facts))
    return LAWS[-1]

  return decorate
