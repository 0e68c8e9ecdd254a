"""The plug: one record of pure functions for each attention mechanism.

`Attention` is to attention what the pair `(init, update)` is to Optax.
"""

from collections.abc import Callable, Collection, Mapping
import dataclasses
import inspect
import types
from typing import Any, Literal, NamedTuple

from jaxtyping import Array

from attention.suggest import near, nearest, one_of

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
  """Hyperparameters for sequences of different lengths; others keep the default.

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
    init_cache: `(variables, batch, max_length, dims, dtype) -> cache`; None, or a
      ValueError, where the mechanism cannot decode token by token.
    decode: `(variables, cache, query, key, value, **call) -> (out, cache)` for
      one position, `query [B, 1, N, H]`; equals the causal call on the whole
      sequence. `call` may hold `scale` and what 'relative' and 'mods' name. Where a
      cache that grows is full, it raises ValueError; with a traced index, as under
      `jax.jit`, the result is NaN. As `init_cache` where it cannot.
    supports: the names of what works; what is not named raises ValueError.

      - 'causal': is_causal=True
      - 'cross': query and key of different lengths
      - 'rowwise': a query's output depends neither on other queries nor on its
        own position, so a decoder may cross-attend token by token
      - 'mask': a key mask [B, 1, 1, S]
      - 'full_mask': a mask that varies along T and N
      - 'segments': query_segment_ids and key_segment_ids
      - 'value_heads': values of more heads than query and key have, each of which
        serves neighbouring heads of values; N is that of the values
      - 'bias': an additive bias [B, N, T, S]
      - 'relative': relative_bias [N, 2L+1] and relative_keys [2L+1, H] or
        [N, 2L+1, H], in `apply` and in `decode`
      - 'sinks': sinks [N]
      - 'logits_soft_cap': a number
      - 'log_forget': log_forget [B, T, N], in causal calls
      - 'mods': score_mod and mask_mod, functions of indices
      - 'dropout': dropout_rate with dropout_rng
      - 'decode': init_cache and decode
      - 'global': global_indices
      - 'shared_qk': query and key are one array: `apply` and `decode` expect
        None as the key
      - 'own_keys': keys and values are made of what `gates` give: all functions
        expect None as the key, and None as the value, or in `apply` values to
        take instead
      - 'sequence': apply_sharded

    approximates: what the error of its outputs is measured against, on the same
      query, key and value: 'dense' attention, to which an exact mechanism is equal
      and which linear attention replaces, or 'shared_qk', dense attention in which
      the query is the key and no position sees itself. None where its scores are
      its own.
    cost: how time and temporaries grow with the length. 'linear' is a promise
      that `benchmarks.bounds` checks; 'quadratic' promises nothing.
    sizes: hyperparameters for short and long sequences and for benchmarks.
    causal_only: whether a call without is_causal=True raises ValueError. Such a
      mechanism cannot serve an encoder.
    prefill: `(variables, cache, query, key, value, lengths, **call) -> cache`:
      the cache after the first `lengths [B]` of P positions, `query [B, P, N,
      H]`, from an empty one, as `decode` of one after another makes it; `call` may
      hold `scale`. None where only `decode` makes a cache.
    apply_sharded: `(variables, query, key, value, *, axis_name, **call) -> out`
      inside `jax.shard_map`. Each of the D devices of the axis has T/D
      neighbouring positions of the query, S/D of key and value, in order, and
      of what `call` holds by position: a key mask [B, 1, 1, S/D], segment ids.
      Variables and tables by distance are whole on every device. Results and
      gradients are those of `apply` on the whole. None, or a ValueError, where
      there is no form for a sequence in parts.
    ignores_padding: whether positions at the end that a key mask hides change
      nothing for the others. False where it matters how long a sequence is, as
      in BigBird, whose last block is global.
    gates: `(variables, inputs) -> {option: array}`: what `apply`, `decode`,
      `prefill` and `apply_sharded` take by position besides query, key and value,
      such as `log_decay [B, T, N]`, read from what these are projected from,
      `inputs [B, T, F]`. None where there is nothing of the kind.
    loss: `(variables, query, key, **call) -> scalar`, with the gates and options of
      a call of `apply`: what the mechanism adds to the mean loss of a model that is
      trained, such as that of an indexer. None adds nothing.
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
  loss: Callable[..., Array] | None = None

  def __call__(self, *args: Any, **options: Any) -> Array:
    """Raises TypeError: a mechanism is a record of functions, and none itself."""
    raise TypeError(
      "an Attention is a record of functions; call mechanism.apply(variables, "
      "query, key, value, …) with variables = mechanism.init(rng, dims), or {} "
      "for a mechanism without any; the attention functions, such as "
      "sliding_window_attention, take query, key and value themselves"
    )


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


CAPABILITIES: Mapping[str, str] = {
  "causal": "causal",
  "cross": "T≠S",
  "rowwise": "stepwise",
  "mask": "mask",
  "full_mask": "any",
  "segments": "packed",
  "value_heads": "v heads",
  "bias": "bias",
  "relative": "rel.",
  "sinks": "logits",
  "logits_soft_cap": "logits",
  "log_forget": "logits",
  "mods": "logits",
  "dropout": "drop",
  "decode": "decode",
  "global": "global",
  "shared_qk": "q=k",
  "own_keys": "kv",
  "sequence": "parts",
}
"""Name in `supports` -> heading of its column in docs/library.md, in that order.

A column of several names has ✓ where all of them are supported.
"""


def required(factory: Callable[..., Attention]) -> list[str]:
  """Names of the hyperparameters that have no default."""
  return [
    name
    for name, p in inspect.signature(factory).parameters.items()
    if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
  ]


def is_factory(function: Callable[..., Any]) -> bool:
  """Whether a function makes a mechanism, and is not an attention function.

  Its annotation says so, or it needs fewer than the two arguments by position
  that every attention function does.
  """
  signature = inspect.signature(function)
  returned = signature.return_annotation
  if returned is Attention or str(returned).rpartition(".")[2] == "Attention":
    return True
  num_positional = 0
  for p in signature.parameters.values():
    if p.kind is p.VAR_POSITIONAL:
      return False
    is_named = p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)
    num_positional += p.default is p.empty and not is_named
  return num_positional < 2


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


class _Named(dict[str, Callable[..., Attention]]):
  def __missing__(self, name: object) -> Any:
    raise KeyError(one_of(name, self))


MECHANISMS: dict[str, Callable[..., Attention]] = _Named()
"""Factory of each mechanism here by its name, in the order of imports."""

FUNCTIONS: dict[str, Mapping[str, inspect.Parameter]] = {}
"""Public attention function -> its parameters, in the order of imports."""

FLAX_OPTIONS = (
  "broadcast_dropout",
  "deterministic",
  "dtype",
  "force_fp32_for_softmax",
  "module",
  "precision",
  "qk_attn_weights_einsum",
  "attn_weights_value_einsum",
)
"""What Flax's modules hand to an `attention_fn` and no function here takes."""


def applied(
  name: str,
  function: Callable[..., Any],
  own: Callable[[Variables], Mapping[str, Any]] = lambda variables: {},
) -> Callable[..., Any]:
  """The `apply` of a record whose function takes query, key and value.

  Args:
    name: the mechanism, for messages.
    function: the attention function, which checks its calls.
    own: variables -> the options of `function` that the record gives it, and a
      call may therefore not have.
  """

  def apply(variables, query, key, value, **call):
    try:
      given = own(variables)
    except KeyError as error:
      accepted_options(name, function, call)  # A wrong option is told first.
      raise ValueError(
        f"variables: {name} needs what its init makes; {error} is missing"
      ) from error
    taken = given.keys() & call.keys()
    if taken:
      raise ValueError(_has_its_own(min(taken), name))
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
  known = {
    name: parameter
    for name, parameter in inspect.signature(function).parameters.items()
    if parameter.kind is not parameter.POSITIONAL_ONLY
  }
  takes_any = any(p.kind is p.VAR_KEYWORD for p in known.values())
  accepted = {}
  for option, asked in options.items():
    if option in own:
      raise ValueError(_has_its_own(option, name))
    if option in known or takes_any:
      accepted[option] = asked
    elif not asks_for_nothing(option, asked):
      raise ValueError(
        f"{option}: {name} attention has no such option; "
        f"{hint(option, name, known)}"
      )
  return accepted


def asks_for_nothing(option: str, value: Any) -> bool:
  """Whether it is an option of some mechanism that is None, False or a zero rate."""
  is_off = isinstance(value, bool | int | float) and not value
  return option in CALL_OPTIONS and (value is None or is_off)


def _has_its_own(option: str, name: str) -> str:
  """Why a call of a record may not have an option."""
  instead = f"call {name}_attention to give another"
  if option in _hyperparameters(name):
    instead = f"pass it to {name}({option}=…), which makes the record"
  return (
    f"{option}: the record of {name} attention has its own, expected none; "
    f"{instead}"
  )


def _hyperparameters(name: str) -> Collection[str]:
  """Names of what the factory of a registered mechanism takes."""
  factory = MECHANISMS.get(name)
  return () if factory is None else inspect.signature(factory).parameters


_SEGMENTS = "query_segment_ids", "key_segment_ids"


def hint(option: str, name: str, known: Mapping[str, inspect.Parameter]) -> str:
  """What to do about an option that `name` does not take."""
  mechanism = name.removesuffix("_attention")
  names = [
    n
    for n, p in known.items()
    if p.kind is p.KEYWORD_ONLY or p.default is not p.empty
  ]
  if option in _SEGMENTS and "segment_ids" in names:
    return (
      "give segment_ids [B, T], since queries and keys are one sequence in a "
      "recurrence"
    )
  if option in FLAX_OPTIONS:
    return (
      "Flax's modules pass it: give them "
      f"attention_fn=as_attention_fn({mechanism}_attention)"
    )
  if option in _hyperparameters(mechanism):
    return f"give it when the mechanism is made: {mechanism}({option}=…)"
  alike = [
    own
    for own in names
    if f"_{own}_" in f"_{option}_" or own.endswith(f"_{option}")
  ]
  having = _having(option, name)
  if option in CALL_OPTIONS or (having and not alike):
    return f"{having} it"
  if alike := alike or nearest(option, names):
    return f"did you mean {' and '.join(map(repr, alike))}?"
  # What others have under a name that is like it.
  others = {n: None for parameters in FUNCTIONS.values() for n in parameters}
  for other in nearest(option, others):
    return f"{_having(other, name)} {other!r}"
  return f"it takes {', '.join(names)}"


def no_hyperparameter(option: str, name: str, known: Collection[str]) -> str:
  """Why a factory cannot be called with an option, and what to do."""
  hint = near(option, known)
  if not hint and option in FUNCTIONS.get(f"{name}_attention", ()):
    hint = f"; a call takes it: {name}_attention(…, {option}=…)"
  names = ", ".join(known) or "none"
  return f"{option}: {name} has no such option (it has: {names}){hint}"


def _having(option: str, name: str) -> str:
  """The text "dense and flash have": others than `name` with an option."""
  if option in CALL_OPTIONS:
    having = supporting(MECHANISMS, CALL_OPTIONS[option])
  else:
    having = [n for n, parameters in FUNCTIONS.items() if option in parameters]
  having = having or [
    f"{n}({option}=…)" for n in MECHANISMS if option in _hyperparameters(n)
  ]
  own = name.removesuffix("_attention")
  having = [n for n in having if n.removesuffix("_attention") != own]
  if len(having) < 2:
    return "".join(f"{name} has" for name in having)
  return f"{', '.join(having[:-1])} and {having[-1]} have"
