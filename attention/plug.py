"""The plug: one record of pure functions for each attention mechanism.

`Attention` is to attention what the pair `(init, update)` is to Optax.
"""

from collections.abc import Callable, Mapping
import dataclasses
import inspect
import types
from typing import Any, Literal, NamedTuple

from jaxtyping import Array

Variables = Mapping[str, Any]
"""`{}`, `{'params': …}`, which are trained, or `{'constants': …}`."""

Cache = Any
"""A pytree of arrays, each with leading axis B."""


class Dims(NamedTuple):
  """Sizes that a mechanism needs to make its variables and caches.

  Attributes:
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; N is a multiple of K.
    head_dim: H.
    max_length: the longest key sequence (Linformer's S).
    features: F, width of what queries are projected from, for mechanisms that have
      `gates`; 0 where nobody knows it.
    value_dim: V, of caches; None is H.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_length: int
  features: int = 0
  value_dim: int | None = None

  @property
  def values(self) -> int:
    """V."""
    return self.head_dim if self.value_dim is None else self.value_dim


Options = Mapping[str, Any]
"""Hyperparameters: keyword arguments of a mechanism's factory."""


# Compared and hashed by identity: models are hashed with their records, and a
# mapping has no hash.
@dataclasses.dataclass(frozen=True, eq=False)
class Sizes:
  """Hyperparameters of a mechanism for sequences of different lengths.

  Hyperparameters that are not named keep the default of the factory.

  Attributes:
    short: for tens of positions, as in `configs/`.
    long: for hundreds or thousands, as in `configs/paper/`.
    timed: `length -> hyperparameters` for `benchmarks/`, so that mechanisms are
      timed at a common size: 256 keys, features or rows, or as many as fit.
  """

  short: Options = dataclasses.field(default_factory=dict)
  long: Options = dataclasses.field(default_factory=dict)
  timed: Callable[[int], Options] = lambda length: {}


class Attention(NamedTuple):
  """One attention mechanism as a record of pure functions.

  Attributes:
    init: `(key, dims) -> variables`.
    apply: `(variables, query, key, value, **call) -> out`; `call` holds
      `mask`, `is_causal`, `scale`, …; an option that the mechanism cannot
      honour raises ValueError.
    init_cache: `(variables, batch, max_length, dims, dtype) -> cache`, or None
      where the mechanism cannot decode token by token.
    decode: `(variables, cache, query, key, value, **call) -> (out, cache)` for
      one position, `query [B, 1, N, H]`; equals the causal call on the whole
      sequence. `call` may hold `scale` and what 'relative' and 'mods' name. None
      where `init_cache` is None.
    supports: the names of what works; what is not named raises ValueError.
      'causal'    is_causal=True
      'cross'     query and key of different lengths
      'rowwise'   a query's output depends neither on other queries nor on its
                  own position, so a decoder may cross-attend token by token
      'mask'      a key mask [B, 1, 1, S]
      'full_mask' a mask that varies along T and N
      'segments'  query_segment_ids and key_segment_ids
      'bias'      an additive bias [B, N, T, S]
      'relative'  relative_bias [N, 2L+1] and relative_keys [2L+1, H] or
                  [N, 2L+1, H], in `apply` and in `decode`
      'sinks'     sinks [N]
      'logits_soft_cap' a number
      'log_forget' log_forget [B, T, N], in causal calls
      'mods'      score_mod and mask_mod, functions of indices
      'dropout'   dropout_rate with dropout_rng
      'decode'    init_cache and decode
      'global'    global_indices
      'shared_qk' query and key are one array: `apply` and `decode` expect
                  None as the key
      'own_keys'  keys and values are made of what `gates` give: `apply`,
                  `decode` and the others expect None as the key, and None as the
                  value, or in `apply` values to take instead
      'sequence'  apply_sharded
    approximates: what the error of its outputs is measured against, on the
      same query, key and value: 'dense' attention, or 'shared_qk', dense
      attention in which the query is the key and no position sees itself. An
      exact mechanism has 'dense' and an error near 0. Linear attention has
      'dense' because it replaces dense attention, although its kernel differs.
      None where the mechanism has scores of its own, with nothing to compare.
    cost: how time and temporaries grow with the length. 'linear' is a promise
      that `benchmarks.bounds` checks; 'quadratic' promises nothing.
    sizes: hyperparameters for short and long sequences and for benchmarks.
    causal_only: whether a call without is_causal=True raises ValueError,
      because the mechanism is defined for the past only. It cannot serve an
      encoder.
    prefill: `(variables, cache, query, key, value, lengths, **call) -> cache`:
      the cache after the first `lengths [B]` of P positions, `query [B, P, N,
      H]`, from an empty one. It equals `decode` of one position after another;
      `call` may hold `scale`. None where only `decode` makes a cache.
    apply_sharded: `(variables, query, key, value, *, axis_name, **call) -> out`
      inside `jax.shard_map`. Each of the D devices of the axis has T/D
      neighbouring positions of the query, S/D of key and value, in order, and
      of what `call` holds by position: a key mask [B, 1, 1, S/D], segment ids.
      Variables and tables by distance are whole on every device. Together the
      results are that of `apply` on the whole, and so are the gradients. None
      where the mechanism has no form for a sequence in parts.
    ignores_padding: whether positions at the end that a key mask hides change
      nothing for the others. False where it matters how long a sequence is, as
      in BigBird, whose last block is global.
    gates: `(variables, inputs) -> {option: array}`: what `apply`, `decode`,
      `prefill` and `apply_sharded` take by position in addition to query, key and
      value, such as `log_decay [B, T, N]`, read from what these are projected
      from, `inputs [B, T, F]`. None where there is nothing of the kind.
  """

  init: Callable[[Array, Dims], Variables]
  apply: Callable[..., Array]
  init_cache: Callable[..., Cache] | None
  decode: Callable[..., tuple[Array, Cache]] | None
  supports: frozenset[str]
  approximates: Literal["dense", "shared_qk"] | None = None
  cost: Literal["linear", "quadratic"] = "quadratic"
  sizes: Sizes = Sizes()
  causal_only: bool = False
  prefill: Callable[..., Cache] | None = None
  apply_sharded: Callable[..., Array] | None = None
  ignores_padding: bool = True
  gates: Callable[[Variables, Array], dict[str, Array]] | None = None


CALL_OPTIONS: Mapping[str, str] = types.MappingProxyType(
  {
    "query_segment_ids": "segments",
    "key_segment_ids": "segments",
    "bias": "bias",
    "relative_bias": "relative",
    "relative_keys": "relative",
    "sinks": "sinks",
    "logits_soft_cap": "logits_soft_cap",
    "log_forget": "log_forget",
    "score_mod": "mods",
    "mask_mod": "mods",
    "dropout_rate": "dropout",
    "dropout_rng": "dropout",
    "global_indices": "global",
    "global_qkv": "global",
  }
)
"""Option that not every mechanism takes -> capability in `supports`."""


def required(factory: Callable[..., Attention]) -> list[str]:
  """Names of the hyperparameters that have no default."""
  return [
    name
    for name, p in inspect.signature(factory).parameters.items()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def is_factory(function: Callable[..., Any]) -> bool:
  """Whether a function makes a mechanism, and is not an attention function.

  Its annotation says so, or it has fewer than the two arguments by position
  that every attention function needs.
  """
  signature = inspect.signature(function)
  returned = signature.return_annotation
  if returned is Attention or str(returned).rpartition(".")[2] == "Attention":
    return True
  kinds = [p.kind for p in signature.parameters.values()]
  if inspect.Parameter.VAR_POSITIONAL in kinds:
    return False
  arrays = [
    p
    for p in signature.parameters.values()
    if p.default is p.empty
    and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
  ]
  return len(arrays) < 2


def example(factory: Callable[..., Attention]) -> Attention:
  """A record of a mechanism from which its facts can be read.

  Hyperparameters have their defaults, or 1 where there is none, because a size
  does not change what is supported, approximated or promised.
  """
  return factory(**dict.fromkeys(required(factory), 1))


def directions(mechanism: Attention) -> tuple[bool, ...]:
  """The values of `is_causal` that a mechanism takes, False first."""
  if mechanism.causal_only:
    return (True,)
  return (False, True) if "causal" in mechanism.supports else (False,)


def can(mechanism: Attention, capability: str) -> bool:
  """Whether a mechanism has a capability of `supports`, or is 'bidirectional'.

  Bidirectional is every mechanism that works without is_causal=True.
  """
  if capability == "bidirectional":
    return not mechanism.causal_only
  return capability in mechanism.supports


def supporting(
  mechanisms: Mapping[str, Callable[..., Attention]], capability: str
) -> list[str]:
  """Names of the mechanisms that have a capability, in the order given."""
  return [
    name
    for name, factory in mechanisms.items()
    if can(example(factory), capability)
  ]


def no_variables(key: Array, dims: Dims) -> Variables:
  """The `init` of a mechanism without variables."""
  del key, dims
  return {}
