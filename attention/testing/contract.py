"""The contract as a list of checks, and `check_mechanism` that runs it."""

from collections.abc import Callable, Mapping, Sequence
import inspect
import pathlib
import textwrap
import traceback
from typing import Any, Literal

from attention.mechanism import Attention, required
from attention.testing import (  # noqa: F401 - each adds its laws
  decoding,
  masking,
  refusals,
  transforms,
  values,
)
from attention.testing.mechanism import LAWS, Check, Mechanism

CHECKS: tuple[Check, ...] = tuple(LAWS)
"""The contract. What a mechanism does not support takes no part."""


def check_mechanism(
  factory: Callable[..., Attention],
  definition: Callable[..., Any],
  *,
  options: Mapping[str, Any] | None = None,
  normalised: bool = True,
  sparse: bool = False,
  pads: bool = True,
  past_error: float = 0.0,
  bounded: bool = True,
  one_matrix: bool = True,
  cache: Literal["length", "nothing"] | None = None,
) -> None:
  """Holds a mechanism to the contract that all mechanisms here keep.

      def test_decay():
        check_mechanism(decay, decay_definition)

  What `supports` names is compared with the definition, alone and together,
  values and gradients; what it does not name must raise. Nothing leaks: the
  future, padding, other examples. Decoding equals the causal call.
  Every check runs under `jax.numpy_rank_promotion('raise')`, which makes jnp
  refuse to broadcast arrays of different ranks: write `rate[:, None] * x`.

  Args:
    factory: `(**options) -> Attention`.
    definition: `(variables, query, key, value, **call) -> out`, the
      mechanism's formula in float64 NumPy. It gets the variables of
      `init`, with other numbers where all of a variable are equal, and the options
      of a call, all floating-point arrays in float64;
      what the record's `gates` read are the keys, as `[B, T, K·H]`;
      for a mechanism whose query is its key ('shared_qk') there is no `key`, and
      for one that makes its own ('own_keys') decoding has no `value`.
      `attention.definitions` has those of the mechanisms here.
    options: hyperparameters for the factory; None is its defaults.
    normalised: whether the rows of the attention matrix sum to 1.
    sparse: whether a query may see none of the keys that a call allows.
    pads: whether a sequence with masked padding gives what the sequence gives
      alone; False where the pattern depends on the length.
    past_error: how far the future may move the past; more than 0 only for a
      mechanism that adds the same terms in another order.
    bounded: whether queries and keys of any length give results near the values;
      False for a sum of values that nothing divides, such as a recurrence's.
    one_matrix: whether the result is one matrix times the values; False where each
      channel of a value has weights of its own, or other values are read as well.
    cache: 'length' if the decode cache must grow with max_length, and be refused when
      it is full, 'nothing' if it must not grow; None allows both.

  Raises:
    AssertionError: lists every check that failed, with what was found and what
      to do.
    ValueError: `factory` makes no mechanism, or a hyperparameter without a default
      is not in `options`.

  Cost: it compiles about twenty-five small programs, half a minute on one core.
  """
  is_function = callable(factory) and not isinstance(factory, Attention)
  takes = [*inspect.signature(factory).parameters] if is_function else []
  if not is_function or takes[:1] in (["query"], ["q"]):
    got = getattr(factory, "__name__", type(factory).__name__)
    raise ValueError(
      f"factory: expected a function that returns an attention.Attention, got {got}"
    )
  options = {} if options is None else dict(options)
  missing = sorted(set(required(factory)) - options.keys())
  if missing:
    raise ValueError(
      f"options: expected values for {', '.join(missing)}, which have no "
      f"default, got {options}"
    )
  facts = normalised, sparse, pads, past_error, bounded, one_matrix, cache
  mechanism = Mechanism(factory, definition, options, *facts)
  checks = [check for check in CHECKS if check.applies(mechanism)]
  failed = []
  for check in checks:
    try:
      check(mechanism)
    except Exception as error:
      failed.append((check, error))
  if failed:
    raise AssertionError(_report(mechanism, failed, len(checks)))


def _report(
  mechanism: Mechanism,
  failed: Sequence[tuple[Check, Exception]],
  total: int,
) -> str:
  """One paragraph for each thing that was found, in the order of `CHECKS`."""
  alike: dict[str, list[tuple[Check, str]]] = {}
  for check, error in failed:
    message, place = str(error), _place(mechanism, error)
    if place:
      message = f"{type(error).__name__}: {message}\n{place}"
    # An error in one place is one fault, for all shapes in its message.
    fault = place or f"{message} {check.advice}"
    if "jax_numpy_rank_promotion" in message:
      fault = _RANKS
    alike.setdefault(fault, []).append((check, message))
  lines = [
    f"{mechanism} fails {len(failed)} of {total} checks of the contract."
  ]
  for fault, checks in alike.items():
    advice = {check.advice for check, _ in checks}
    contract = advice.pop() if len(advice) == 1 else _RAISES
    lines += [
      "",
      ", ".join(check.name for check, _ in checks),
      "  found: " + textwrap.indent(checks[0][1], "    ").strip(),
      f"  contract: {_RANKS if fault == _RANKS else contract}",
    ]
  return "\n".join(lines)


_RAISES = "A call that `supports` names must not raise an error."
_RANKS = (
  "Write out the axes that arrays get, `rate[:, None] * distance[None, :]`: "
  "the contract is checked under jax.numpy_rank_promotion('raise')."
)


def _place(mechanism: Mechanism, error: Exception) -> str:
  """Where a mechanism raised, in the file of its factory if that took part."""
  if isinstance(error, AssertionError):
    return ""
  here = str(pathlib.Path(__file__).parent)
  frames = traceback.extract_tb(error.__traceback__)
  frames = [x for x in frames if not x.filename.startswith(here)]
  own = inspect.getfile(inspect.unwrap(mechanism.factory))
  for frame in [x for x in frames if x.filename == own][-1:] or frames[-1:]:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"
  return ""
