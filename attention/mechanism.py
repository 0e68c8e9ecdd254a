"""Attention mechanisms: records of pure functions, which configs look up by name.

`Attention` is to attention what the pair `(init, update)` is to Optax. The decorator of
a factory adds it to `ATTENTIONS`; the record has all other properties of the mechanism.
A mechanism of another project needs no entry: its name is its import path.
"""

from collections.abc import Callable, Collection, Mapping
from collections.abc import Set as AbstractSet
import dataclasses
import inspect
from types import MappingProxyType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin
import warnings

from jaxtyping import Array

from attention.names import (
  failure_location,
  resolve,
  unknown_name,
  unknown_option,
)

Variables = Mapping[str, Any]
"""`{}`, `{'params': …}`, which are trained, or `{'constants': …}`."""

Cache = Any
"""A pytree of arrays, each with leading axis B."""


class Dims(NamedTuple):
  """Sizes from which a mechanism creates its variables and caches.

  Attributes:
    num_heads: N, query heads.
    num_kv_heads: K, key/value heads; N is a multiple of K.
    head_dim: H.
    max_length: the longest key sequence (Linformer's S).
    features: F, the width of the inputs of the query projection, for mechanisms with
      `gates`; 0 if unknown.
    value_dim: V, the width of values in caches; None means H.
  """

  num_heads: int
  num_kv_heads: int
  head_dim: int
  max_length: int
  features: int = 0
  value_dim: int | None = None

  @property
  def values(self) -> int:
    """V, the width of values."""
    return self.head_dim if self.value_dim is None else self.value_dim


Options = Mapping[str, Any]
"""Hyperparameters: keyword arguments of a mechanism's factory."""


# Compared and hashed by identity: a model hashes its records, and a mapping has no
# hash.
@dataclasses.dataclass(frozen=True, eq=False)
class Hyperparameters:
  """Hyperparameters by sequence length; those that are missing keep their defaults.

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
    apply: `(variables, query, key, value, **call) -> out`; `call` has `mask`,
      `is_causal`, `scale`, …; an unsupported option raises ValueError.
    init_cache: `(variables, batch, max_length, dims, dtype) -> cache`; None if the
      mechanism cannot decode token by token.
    decode: `(variables, cache, query, key, value, **call) -> (out, cache)` for
      one position, `query [B, 1, N, H]`; equals the causal call on the whole
      sequence. `call` may have `scale` and the options of 'relative' and 'mods'. If a
      growing cache is full, it raises ValueError; with a traced index, as under
      `jax.jit`, the result is NaN. None if `init_cache` is None.
    supports: the names of its capabilities; using any other raises ValueError.

      - 'causal': is_causal=True
      - 'cross': query and key of different lengths
      - 'rowwise': a query's output depends neither on other queries nor on its
        own position, so a decoder may cross-attend token by token
      - 'mask': a key mask [B, 1, 1, S]
      - 'full_mask': a mask that varies along T and N
      - 'segments': query_segment_ids and key_segment_ids
      - 'value_heads': values with more heads than query and key, each of which
        serves several consecutive value heads; N counts the value heads
      - 'bias': an additive bias [B, N, T, S]
      - 'relative': relative_bias [N, 2L+1], and relative_keys and
        relative_queries [2L+1, H] or [N, 2L+1, H], in `apply` and in `decode`
      - 'sinks': sinks [N]
      - 'logits_soft_cap': a number
      - 'log_forget': log_forget [B, T, N], in causal calls
      - 'mods': score_mod and mask_mod, functions of indices
      - 'dropout': dropout_rate with dropout_rng
      - 'decode': init_cache and decode
      - 'global': global_indices
      - 'shared_qk': query and key are one array: `apply` and `decode` expect
        None as the key
      - 'own_keys': the mechanism computes keys and values from the arrays of `gates`,
        or with 'shared_qk' from the query: all functions expect None as the key and
        the value; `apply` also takes values, which replace its own
      - 'sequence': axis_name, the mesh axis that shards the sequence, inside
        `jax.shard_map`. Each of its D devices has T/D consecutive positions of the
        query, S/D of key and value, in order, and the same positions of every other
        array of the call: a key mask [B, 1, 1, S/D], segment ids. Variables and tables
        by distance are replicated. Results and gradients equal the unsharded ones

    approximates: the attention from which the error of its outputs is measured, on
      the same query, key and value: 'dense', or 'shared_qk', dense attention in which
      the query is also the key and no position sees itself. None if the mechanism
      approximates neither.
    cost: how time and temporaries grow with the length. `benchmarks.bounds` checks
      'linear'; 'quadratic' has no check.
    sizes: hyperparameters for short and long sequences and for benchmarks.
    causal_only: whether a call without is_causal=True raises ValueError. Such a
      mechanism cannot serve an encoder.
    prefill: `(variables, cache, query, key, value, lengths, **call) -> cache`: from
      an empty cache, the cache after the first `lengths [B]` of P positions, `query
      [B, P, N, H]`, as if `decode` had read them one by one; `call` may have
      `scale`. None if only `decode` fills a cache.
    ignores_padding: whether masked positions at the end never affect the others.
      False if the length of a sequence matters, as in BigBird, whose last block is
      global.
    gates: `(variables, inputs) -> {option: array}`: the arrays with a position axis
      that `apply`, `decode` and `prefill` take in addition to query, key and value,
      such as `log_decay [B, T, N]`, computed from the inputs of the projections,
      `[B, T, F]`. None if there are none.
    loss: `(variables, query, key, **call) -> scalar`, with the gates and options of
      `apply`: an auxiliary loss, such as that of an indexer, which is added to the
      mean loss in training. None means no auxiliary loss.
    reads_query_inputs: whether `gates` takes a third argument, the vectors
      `[B, T, R]` from which a model with `query_rank` R projects its queries.
    shares_gates: whether a layer uses the gates of the nearest earlier layer that
      computes them, instead of its own.
    linear_in_values: whether the output is linear in the values. If it is not, values
      have width H, and `attention_weights` needs them as an argument.
  """

  init: Callable[[Array, Dims], Variables]
  apply: Callable[..., Array]
  init_cache: Callable[..., Cache] | None
  decode: Callable[..., tuple[Array, Cache]] | None
  supports: frozenset[str]
  approximates: Literal["dense", "shared_qk"] | None = None
  cost: Literal["linear", "quadratic"] = "quadratic"
  sizes: Hyperparameters = Hyperparameters()
  causal_only: bool = False
  prefill: Callable[..., Cache] | None = None
  ignores_padding: bool = True
  gates: Callable[..., dict[str, Array]] | None = None
  loss: Callable[..., Array] | None = None
  reads_query_inputs: bool = False
  shares_gates: bool = False
  linear_in_values: bool = True

  def __call__(self, *args: Any, **options: Any) -> Array:
    """Raises TypeError: a mechanism is a record of functions."""
    raise TypeError(
      "an Attention is a record of functions; call mechanism.apply(variables, "
      "query, key, value, …) with variables = mechanism.init(rng, dims), or {} "
      "for a mechanism without variables; the attention functions, such as "
      "sliding_window_attention, take query, key and value themselves"
    )

  @property
  def apply_sharded(self) -> Callable[..., Array]:
    """Former name of `apply`, whose calls have `axis_name`, until 1.0."""
    message = "apply_sharded is apply now, which takes axis_name"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return self.apply


CALL_OPTIONS: Mapping[str, str] = MappingProxyType(
  {
    "query_segment_ids": "segments",
    "key_segment_ids": "segments",
    "bias": "bias",
    "relative_bias": "relative",
    "relative_keys": "relative",
    "relative_queries": "relative",
    "sinks": "sinks",
    "logits_soft_cap": "logits_soft_cap",
    "log_forget": "log_forget",
    "score_mod": "mods",
    "mask_mod": "mods",
    "dropout_rate": "dropout",
    "dropout_rng": "dropout",
    "global_indices": "global",
    "global_qkv": "global",
    "axis_name": "sequence",
  }
)
"""Option that only some mechanisms accept -> its capability in `supports`."""


_CAPABILITY_NAMES = (
  "causal cross rowwise mask full_mask segments value_heads bias relative sinks "
  "logits_soft_cap log_forget mods dropout decode global shared_qk own_keys sequence"
)
CAPABILITIES = tuple(_CAPABILITY_NAMES.split())
"""All names that `supports` may have."""


def required_names(factory: Callable[..., Attention]) -> list[str]:
  """Names of the hyperparameters that have no default."""
  return [
    name
    for name, p in inspect.signature(factory).parameters.items()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def directions(mechanism: Attention) -> tuple[bool, ...]:
  """The values of `is_causal` that a mechanism supports, False first."""
  if mechanism.causal_only:
    return (True,)
  return (False, True) if "causal" in mechanism.supports else (False,)


def can(mechanism: Attention, capability: str) -> bool:
  """Whether a mechanism has a capability.

  In addition to those of `supports`, 'bidirectional' means that it works without
  is_causal=True.
  """
  if capability == "bidirectional":
    return not mechanism.causal_only
  return capability in mechanism.supports


def supporting(
  mechanisms: Mapping[str, Callable[..., Attention]], capability: str
) -> list[str]:
  """Names of the mechanisms that have a capability, in the order of `mechanisms`."""
  return [
    name
    for name, factory in mechanisms.items()
    if can(example(factory), capability)
  ]


def no_variables(key: Array, dims: Dims) -> Variables:
  """The `init` of a mechanism without variables."""
  del key, dims
  return {}


class _Factories(dict[str, Callable[..., Attention]]):
  def __missing__(self, name: object) -> Any:
    raise KeyError(unknown_name(name, self))


FACTORIES: dict[str, Callable[..., Attention]] = _Factories()

ATTENTIONS: Mapping[str, Callable[..., Attention]] = MappingProxyType(FACTORIES)
"""name -> typed factory, in the order of imports;
`ATTENTIONS['performer'](num_features=64)`."""


def accepted_options(
  name: str,
  function: Callable[..., Any],
  options: Mapping[str, Any],
  own: Collection[str] = (),
) -> dict[str, Any]:
  """Returns the options of a call, or raises if `function` does not accept one.

  Args:
    name: the mechanism, for the message.
    function: an attention function with keyword-only options.
    options: the caller's options.
    own: options of `function` that the mechanism sets.

  Raises:
    ValueError: `function` does not accept an option, or the mechanism sets it.
  """
  known = inspect.signature(function).parameters
  known = {n: p for n, p in known.items() if p.kind is not p.POSITIONAL_ONLY}
  takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
  for option in options:
    if option in own:
      raise ValueError(reserved_option(option, name))
    if option not in known and not takes_any:
      raise ValueError(unknown_option(option, name, known))
  return dict(options)


def reserved_option(option: str, name: str) -> str:
  """The error message for an option of a call that the mechanism sets itself."""
  return (
    f"{option}: {name} sets it itself, expected none in a call; call the attention "
    "function to choose it"
  )


def find(name: str) -> Callable[..., Attention]:
  """Looks up the factory of a mechanism, of this project or another.

  Args:
    name: key of `ATTENTIONS`, or 'package.module:factory', which is imported.

  Raises:
    ValueError: there is no such factory, or it is not annotated `-> Attention`. The
      message is one line.
  """
  factory = resolve(name, ATTENTIONS, "factory")
  if name in ATTENTIONS:
    return factory
  expected = "expected a function that returns an attention.Attention"
  try:
    if isinstance(factory, Attention):
      raise TypeError
    signature = inspect.signature(factory)
  except (TypeError, ValueError):  # Not a function, or one written in C.
    raise ValueError(
      f"{expected}, but {name} is of type {type(factory).__name__}"
    ) from None
  if next(iter(signature.parameters), None) in ("query", "q"):
    raise ValueError(
      f"{expected}, but {name} takes a query, as an attention function does; "
      "name the factory of its mechanism"
    )
  # A name may come from a file, so only annotated factories are called.
  returned = signature.return_annotation
  text = returned if isinstance(returned, str) else ""
  if returned is not Attention and text.rpartition(".")[2] != "Attention":
    raise ValueError(
      f"{name} is not annotated `-> Attention`; only annotated factories are called "
      "by import path, so annotate it"
    )
  return factory


def build(name: str, options: Mapping[str, Any]) -> Attention:
  """Creates a mechanism and checks its record.

  Args:
    name: as in `find`.
    options: hyperparameters, the keyword arguments of the factory.

  Raises:
    ValueError: an option is unknown, missing or rejected by the factory, and the
      message starts with the option; for any other error, it starts with 'name'.
  """
  factory = _factory(name)
  parameters = inspect.signature(factory).parameters
  takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
  for option in options:
    if option not in parameters and not takes_any:
      raise ValueError(unknown_option(option, name, parameters))
    # Factories of this project check their own values, with better messages.
    allowed = name not in ATTENTIONS and _plain_types(parameters.get(option))
    if allowed and not isinstance(options[option], allowed):
      names = " or ".join(kind.__name__ for kind in allowed)
      names = names.replace("NoneType", "None")
      raise ValueError(f"{option}: expected {names}, got {options[option]!r}")
  for option in required_names(factory):
    if option not in options:
      raise ValueError(f"{option}: {name} needs it, got nothing")
  try:
    record = factory(**options)
  except Exception as error:
    # A factory should raise ValueError, but one of another project may raise anything.
    option = str(error).partition(":")[0]
    if isinstance(error, ValueError) and option in parameters:
      raise
    raise ValueError(
      f"name: {name} raised {failure_location(error, name)}"
    ) from None
  if not isinstance(record, Attention):
    raise ValueError(
      f"name: {name} returned a {type(record).__name__}; expected an "
      "attention.Attention"
    )
  if not isinstance(record.supports, AbstractSet):
    raise ValueError(
      f"name: the `supports` of {name} is a {type(record.supports).__name__}; "
      "expected a frozenset of names"
    )
  for capability in record.supports:
    if capability not in CAPABILITIES:
      raise ValueError(
        f"name: the `supports` of {name}: {unknown_name(capability, CAPABILITIES)}"
      )
  if "decode" in record.supports and None in (record.init_cache, record.decode):
    raise ValueError(
      f"name: {name} supports 'decode', but its init_cache or decode is None"
    )
  return record


_PLAIN = (bool, int, float, str, type(None))


def _plain_types(parameter: inspect.Parameter | None) -> tuple[type, ...]:
  """The types that an annotation of plain types allows; empty for any other."""
  if parameter is None:
    return ()
  members = [parameter.annotation]
  if get_origin(parameter.annotation) in (UnionType, Union):
    members = get_args(parameter.annotation)
  if not all(x in _PLAIN for x in members):
    return ()
  wider = ((x, int) if x is float else (x,) for x in members)
  return tuple(dict.fromkeys(kind for kinds in wider for kind in kinds))


def example(mechanism: Callable[..., Attention] | str) -> Attention:
  """Builds a mechanism with default hyperparameters, to read its properties.

  Hyperparameters without a default are 1: sizes do not change `supports`,
  `approximates` or `cost`.

  Args:
    mechanism: a factory, or its name as in `find`.

  Raises:
    ValueError: as in `build`, if `mechanism` is a name.
  """
  if isinstance(mechanism, str):
    return build(
      mechanism, dict.fromkeys(required_names(_factory(mechanism)), 1)
    )
  return mechanism(**dict.fromkeys(required_names(mechanism), 1))


def _factory(name: str) -> Callable[..., Attention]:
  """`find`, with error messages that start with the config field 'name'."""
  try:
    return find(name)
  except ValueError as error:
    raise ValueError(f"name: {error}") from None
