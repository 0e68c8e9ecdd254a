"""The contract as a list of checks, and `check_mechanism` that runs it."""

from collections.abc import Callable, Mapping
import pathlib
import textwrap
import traceback
from typing import Any, Literal

from attention import plug
from attention.testing import decoding, masking, refusals, transforms, values
from attention.testing.check import Check
from attention.testing.mechanism import Mechanism

CHECKS: tuple[Check, ...] = (
  *refusals.CHECKS,
  *values.CHECKS,
  *masking.CHECKS,
  *transforms.CHECKS,
  *decoding.CHECKS,
)
"""The contract. What a mechanism does not support takes no part."""

_HERE = str(pathlib.Path(__file__).parent)


def check_mechanism(
  factory: Callable[..., plug.Attention],
  definition: Callable[..., Any],
  *,
  options: Mapping[str, Any] | None = None,
  normalised: bool = True,
  sparse: bool = False,
  pads: bool = True,
  past_error: float = 0.0,
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
      `init` and the options of a call, all floating-point arrays in float64;
      for a mechanism whose query is its key ('shared_qk') there is no `key`.
      `attention.definitions` has those of the mechanisms here.
    options: hyperparameters for the factory; None is its defaults.
    normalised: whether the rows of the attention matrix sum to 1.
    sparse: whether a query may see none of the keys that a call allows.
    pads: whether a sequence with masked padding gives what the sequence gives
      alone; False where the pattern depends on the length.
    past_error: how far the future may move the past; more than 0 only for a
      mechanism that adds the same terms in another order.
    cache: 'length' if the decode cache must grow with max_length, 'nothing' if
      it must not; None allows both.

  Raises:
    AssertionError: lists every check that failed, with what was found and what
      to do.
    ValueError: a hyperparameter without a default is not in `options`.

  Cost: it compiles about fifty small programs, a minute on one core.
  """
  options = {} if options is None else dict(options)
  missing = sorted(set(plug.required(factory)) - options.keys())
  if missing:
    raise ValueError(
      f"options: expected values for {', '.join(missing)}, which have no "
      f"default, got {options}"
    )
  mechanism = Mechanism(
    factory,
    definition,
    options,
    normalised=normalised,
    sparse=sparse,
    pads=pads,
    past_error=past_error,
    cache=cache,
  )
  checks = [check for check in CHECKS if check.applies(mechanism)]
  failed: dict[tuple[str, str], list[str]] = {}
  for check in checks:
    try:
      check(mechanism)
    except Exception as error:
      found = (_message(error), check.advice)
      failed.setdefault(found, []).append(check.name)
  if failed:
    raise AssertionError(_report(mechanism, failed, len(checks)))


def _message(error: Exception) -> str:
  """What was found; of an error that is not a check's own, also where."""
  if isinstance(error, AssertionError):
    return str(error)
  frames = traceback.extract_tb(error.__traceback__)
  outside = [x for x in frames if not x.filename.startswith(_HERE)]
  place = f" ({outside[0].filename}:{outside[0].lineno})" if outside else ""
  return f"{type(error).__name__}: {error}{place}"


def _report(
  mechanism: Mechanism, failed: Mapping[tuple[str, str], list[str]], total: int
) -> str:
  """One paragraph for each thing that was found, in the order of `CHECKS`."""
  count = sum(map(len, failed.values()))
  lines = [f"{mechanism} fails {count} of {total} checks of the contract."]
  for (message, advice), names in failed.items():
    lines += ["", ", ".join(names), textwrap.indent(message, "  found: ")]
    lines += [f"  contract: {advice}"]
  return "\n".join(lines)
