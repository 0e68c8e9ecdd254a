"""A mechanism as the contract sees it: its record, and what it is held to."""

from collections.abc import Callable, Mapping
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from attention.gates import gates_from_keys
from attention.plug import Attention, Dims, Variables
from attention.testing.calls import Case, require


@dataclasses.dataclass(frozen=True, eq=False)
class Mechanism:
  """A factory with hyperparameters, its definition, and what cannot be read.

  Attributes:
    factory: `(**options) -> Attention`.
    definition: `(variables, query, key, value, **call) -> out` in float64
      NumPy; without `key` where the query is the key ('shared_qk').
    options: hyperparameters, given to the factory.
    normalised: the rows of the attention matrix sum to 1.
    sparse: a query may see none of the keys that a call allows.
    pads: a sequence with padding gives what the shorter one gives.
    past_error: how far the future may change the past: 0 is not by a bit; a
      mechanism that sorts adds the same terms in another order.
    bounded: no result is far above the values, for keys and queries of any length.
    cache: what the decode cache grows with, 'length' or 'nothing'; None is
      either.
  """

  factory: Callable[..., Attention]
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
  def record(self) -> Attention:
    """What the factory returns; its gates, if it has any, read its keys."""
    return gates_from_keys(self.factory(**self.options))

  @functools.cached_property
  def attention(self) -> Attention:
    """The record; where the query is the key, it takes that array once.

    A mechanism that makes its own keys and values takes values in `apply` alone.
    One that is causal only is called with is_causal=True.
    """
    if self.record.causal_only:
      return self.record._replace(
        apply=lambda *arrays, **call: self.record.apply(
          *arrays, **self._directed(call)
        )
      )
    apply, decode = self.record.apply, self.record.decode
    prefill = self.record.prefill
    if self.makes_keys_and_values:
      return self.record._replace(
        apply=lambda variables, query, key, value=None, **call: apply(
          variables, query, key, value, **call
        ),
        decode=decode
        and (
          lambda variables, cache, query, key: decode(
            variables, cache, query, key, None
          )
        ),
        prefill=prefill
        and (
          lambda variables, cache, query, key, lengths: prefill(
            variables, cache, query, key, None, lengths
          )
        ),
      )
    if not self.shares_query_and_key:
      return self.record
    return self.record._replace(
      apply=lambda variables, query, value, **call: apply(
        variables, query, None, value, **call
      ),
      decode=decode
      and (
        lambda variables, cache, query, value: decode(
          variables, cache, query, None, value
        )
      ),
      prefill=prefill
      and (
        lambda variables, cache, query, value, lengths: prefill(
          variables, cache, query, None, value, lengths
        )
      ),
    )

  @property
  def supports(self) -> frozenset[str]:
    """What the record claims."""
    return self.record.supports

  @property
  def shares_query_and_key(self) -> bool:
    """Whether query and key are one array."""
    return "shared_qk" in self.supports

  @property
  def makes_keys_and_values(self) -> bool:
    """Whether it does, from its gates; values are then given in `apply` alone."""
    return "own_keys" in self.supports

  def _directed(self, call: dict[str, Any]) -> dict[str, Any]:
    """The options of a call, is_causal=True added where nothing else works."""
    return {"is_causal": True, **call} if self.record.causal_only else call

  def variables(self, dims: Dims) -> Variables:
    """The variables that `init` draws, once for each `dims`."""
    return self.once(("variables", dims), self._drawn, dims)

  def _drawn(self, dims: Dims) -> Variables:
    # One program, where eager JAX would compile one for each operation.
    return jax.jit(lambda key: self.record.init(key, dims))(jax.random.key(0))

  def draw(
    self, case: Case, seed: int = 0, *, cached: bool = False
  ) -> tuple[list, dict[str, Any]]:
    """`case.draw`, without the key where the query is the key.

    Without the value, too, if `cached`, where a mechanism makes its own: a cache
    has no place for others.
    """
    arrays, call = case.draw(seed)
    if cached and self.makes_keys_and_values:
      return arrays[:2], call
    return arrays[:: 2 if self.shares_query_and_key else 1], call

  def define(self, variables: Variables, *arrays: Any, **call: Any) -> Any:
    """The definition's result, checked to be float64.

    Floating-point arrays must come in float64, as `in_float64` makes them.
    """
    out = self.definition(variables, *arrays, **self._directed(call))
    require(
      isinstance(out, np.ndarray) and out.dtype == np.float64,
      f"definition: expected a float64 NumPy array, got {type(out).__name__} "
      f"{getattr(out, 'dtype', '')}; compute it with numpy, not with jax.numpy",
    )
    return out

  def once(self, key: Any, make: Callable[..., Any], *args: Any) -> Any:
    """`make(*args)`, kept under `key` as long as the mechanism lives."""
    if key not in self._made:
      self._made[key] = make(*args)
    return self._made[key]


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
  """Makes `make(mechanism, *args)` once for each mechanism and arguments.

  Compiling takes most of the contract's time, so checks share programs.
  """

  @functools.wraps(make)
  def made(mechanism, *args):
    return mechanism.once((make, *args), make, mechanism, *args)

  return made


def in_float64(tree: Any) -> Any:
  """Floating-point arrays as float64 NumPy arrays, all else as it is."""

  def converted(x):
    is_number = isinstance(x, float)
    is_floating = jnp.issubdtype(jnp.result_type(x), jnp.floating)
    return np.asarray(x, np.float64) if is_floating and not is_number else x

  return jax.tree.map(converted, tree)
