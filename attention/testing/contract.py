"""The contract, a list of checks, and `check_mechanism`, which runs them."""

from collections.abc import Callable, Mapping, Sequence
import inspect
import pathlib
import textwrap
import traceback
from typing import Any, Literal

from attention.mechanism import Attention, required_names
from attention.testing import (  # noqa: F401 - each adds its laws
  decoding,
  masking,
  refusals,
  transforms,
  values,
)
from attention.testing.mechanism import LAWS, Check, Mechanism

CHECKS: tuple[Check, ...] = tuple(LAWS)
"""The contract. Checks of capabilities that a mechanism lacks are skipped."""


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
  """Checks a mechanism against the contract of all mechanisms in this library.

      def test_decay():
        check_mechanism(decay, decay_definition)

  The capabilities in `supports` are compared with the definition, separately and
  combined, in values and gradients; all others must raise. The future, masked padding
  and other examples must not affect a result. Decoding must equal the causal call.
  Every check runs under `jax.numpy_rank_promotion('raise')`, which makes jnp
  refuse to broadcast arrays of different ranks: write `rate[:, None] * x`.

  Args:
    factory: `(**options) -> Attention`.
    definition: `(variables, query, key, value, **call) -> out`, the formula of the
      mechanism in float64 NumPy. It gets the variables of `init`, with noise added to
      constant ones, and the options of a call, with all floating-point arrays in
      float64. The inputs of the mechanism's `gates` are the keys, as `[B, T, K·H]`. A
      mechanism whose query is its key ('shared_qk') gets no `key`, and if a mechanism
      computes its own keys ('own_keys'), decoding has no `value`.
      `attention.definitions` has the definitions of the mechanisms in this library.
    options: hyperparameters for the factory; None means its defaults.
    normalised: whether the rows of the attention matrix sum to 1.
    sparse: whether a query may see none of the keys that a call allows.
    pads: whether masked padding at the end does not change the results of a sequence;
      False if the pattern depends on the length.
    past_error: the largest effect of later positions on earlier results; above 0 only
      for a mechanism that may add the same terms in another order.
    bounded: whether results are of the size of the values for queries and keys of any
      norm; False for an unnormalised sum of values, as in a recurrence.
    one_matrix: whether the result is one matrix times the values; False if each channel
      of a value has its own weights, or if the result depends on other values.
    cache: 'length' if the cache must grow with max_length and decoding with a full
      cache must raise, 'nothing' if the cache must not grow; None allows both.

  Raises:
    AssertionError: at least one check failed; the message lists each of them with the
      difference and advice.
    ValueError: `factory` does not return a mechanism, or `options` lacks a
      hyperparameter without default.

  Cost: compiles about twenty-five small programs, half a minute on one core.
  """
  is_function = callable(factory) and not isinstance(factory, Attention)
  parameters = [*inspect.signature(factory).parameters] if is_function else []
  if not is_function or parameters[:1] in (["query"], ["q"]):
    got = getattr(factory, "__name__", type(factory).__name__)
    raise ValueError(
      f"factory: expected a function that returns an attention.Attention, got {got}"
    )
  options = {} if options is None else dict(options)
  missing = sorted(set(required_names(factory)) - options.keys())
  if missing:
    raise ValueError(
      f"options: expected values for {', '.join(missing)}, which have no "
      f"default, got {options}"
    )
  __tracebackhide__ = True  # pytest shows the message first.
  properties = normalised, sparse, pads, past_error, bounded, one_matrix, cache
  mechanism = Mechanism(factory, definition, options, *properties)
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
  """Formats one paragraph per distinct failure, in the order of `CHECKS`."""
  failures: dict[str, list[tuple[Check, str]]] = {}
  for check, error in failed:
    message, location = str(error), _location(mechanism, error)
    if location:
      message = f"{type(error).__name__}: {message}\n{location}"
    # Errors that are raised at one line are one failure, even if their messages differ.
    failure = location or f"{message} {check.advice}"
    if "jax_numpy_rank_promotion" in message:
      failure = _RANKS
    failures.setdefault(failure, []).append((check, message))
  lines = [
    f"{mechanism} fails {len(failed)} of {total} checks of the contract."
  ]
  for failure, checks in failures.items():
    advice = {check.advice for check, _ in checks}
    contract = advice.pop() if len(advice) == 1 else _RAISES
    lines += [
      "",
      ", ".join(check.name for check, _ in checks),
      "  found: " + textwrap.indent(checks[0][1], "    ").strip(),
      f"  contract: {_RANKS if failure == _RANKS else contract}",
    ]
  return "\n".join(lines)


_RAISES = "A call that `supports` allows must not raise an error."
_RANKS = (
  "Add broadcast axes explicitly, `rate[:, None] * distance[None, :]`: "
  "the contract is checked under jax.numpy_rank_promotion('raise')."
)


def _location(mechanism: Mechanism, error: Exception) -> str:
  """The line that raised an error, in the file of the factory if possible."""
  if isinstance(error, AssertionError):
    return ""
  here = str(pathlib.Path(__file__).parent)
  frames = traceback.extract_tb(error.__traceback__)
  frames = [x for x in frames if not x.filename.startswith(here)]
  own = inspect.getfile(inspect.unwrap(mechanism.factory))
  for frame in [x for x in frames if x.filename == own][-1:] or frames[-1:]:
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"
  return ""
