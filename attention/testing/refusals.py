"""What a record claims, and what a mechanism must refuse."""

from collections.abc import Iterator
import contextlib
from functools import partial
import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

from attention.capabilities import CAPABILITIES
from attention.testing.calls import Case, as_jax, require
from attention.testing.check import Check
from attention.testing.mechanism import Mechanism


def _drawn(mechanism: Mechanism, case: Case) -> tuple[Any, list, dict]:
  """`apply` with variables, the arrays, and the options of a call."""
  apply = partial(mechanism.attention.apply, mechanism.variables(case.dims))
  return apply, *as_jax(mechanism.draw(case))


def _record(mechanism: Mechanism) -> None:
  supports = mechanism.supports
  unknown = ", ".join(sorted(supports - CAPABILITIES.keys()))
  require(not unknown, f"`supports` has unknown names: {unknown}")
  decodes = "decode" in supports
  for name in ("init_cache", "decode"):
    given = getattr(mechanism.record, name) is not None
    require(
      given == decodes,
      f"`supports` has {'' if decodes else 'no '}'decode', and {name} is "
      f"{'given' if given else 'None'}",
    )
  require(
    "causal" in supports or not decodes,
    "`supports` has 'decode' without 'causal'",
  )


def _raised(
  name: str, pattern: str, apply: Any, *qkv: Any, **call: Any
) -> None:
  """Requires that a call raises ValueError with a message like `pattern`.

  Args:
    name: what is wrong with the call.
    pattern: a regular expression for the beginning of the message.
    apply: the function.
    *qkv: its arrays.
    **call: its options.
  """
  try:
    apply(*map(jnp.asarray, qkv), **as_jax(call))
  except ValueError as error:
    require(
      re.match(pattern, str(error), re.DOTALL),
      f"{name} raises ValueError({str(error)!r}), expected a message like "
      f"{pattern!r}",
    )
  except Exception as error:
    raise AssertionError(
      f"{name} raises {type(error).__name__}({error}), expected ValueError"
    ) from error
  else:
    raise AssertionError(f"{name} is accepted, expected ValueError")


_ARGUMENTS = {
  "causal": "is_causal",
  "cross": "key|query|value",
  "full_mask": "mask",
  "segments": "query_segment_ids|key_segment_ids",
  "relative": "relative_bias|relative_keys",
  "dropout": "dropout_rate|dropout_rng",
  "mods": "score_mod|mask_mod",
  "global": "global_indices",
}


def _refused(mechanism: Mechanism, feature: str) -> None:
  """Asking for what is not supported raises."""
  case, more = Case((feature,)), {}
  if feature == "dropout":
    case = Case()
    more = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
  elif feature == "mods":
    case, more = Case(), {"score_mod": lambda score, *indices: score}
  elif feature == "log_forget":
    case = Case((feature, "causal"))
  elif feature == "cross":
    case = Case(length=7, source_length=13)
  apply, qkv, call = _drawn(mechanism, case)
  arguments = _ARGUMENTS.get(feature, feature)
  # "argument: what was expected and what came; what to do instead"
  pattern = f"({arguments}): .+; .+"
  _raised(f"a call with {arguments}", pattern, apply, *qkv, **call, **more)


def _both_directions(mechanism: Mechanism) -> None:
  """A mechanism that is causal only refuses to look ahead."""
  apply, qkv, call = _drawn(mechanism, Case())
  pattern = "is_causal: expected True, .+; .+"
  _raised("is_causal=False", pattern, apply, *qkv, **call, is_causal=False)


def _unknown_option(mechanism: Mechanism, value: Any) -> None:
  apply, qkv, _ = _drawn(mechanism, Case())
  try:
    apply(*qkv, widnow=value)
  except (TypeError, ValueError) as error:
    require(
      "widnow" in str(error),
      f"the error for widnow={value} does not name it: {error}",
    )
  else:
    raise AssertionError(
      f"the unknown option widnow={value} is accepted, expected TypeError or "
      "ValueError"
    )


@contextlib.contextmanager
def _unannotated() -> Iterator[None]:
  """Lets a wrong argument through jaxtyping to the function's own checks."""
  before = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    yield
  finally:
    jaxtyping.config.update("jaxtyping_disable", before)


def _wrong_arguments(mechanism: Mechanism) -> None:
  """Every shape that does not fit is an error that names the argument."""
  apply, arrays, _ = _drawn(mechanism, Case())
  query, *key, value = map(np.asarray, arrays)
  wrong = [
    ("query", r"query: expected .+ got", (query[0], *key, value)),
    ("value", r"value: expected .+ got", (query, *key, value[:, :5])),
    ("query", r"query: .*heads", (query[:, :, :3], *key, value)),
    (
      "query",
      r"(query|key|value): expected .* one",
      [x[:, :0] for x in (query, *key, value)],
    ),
  ]
  if key:
    less = key[0][..., :4]
    wrong.append(("key", r"key: expected .+ got", (query, less, value)))
  with _unannotated():
    for name, pattern, qkv in wrong:
      shapes = [x.shape for x in qkv]
      _raised(f"{name} of wrong shape ({shapes})", pattern, apply, *qkv)
    qkv = (query, *key, value)
    pattern = "mask: expected" if "mask" in mechanism.supports else "mask: "
    for mask in (
      np.ones((2, 13), bool),
      np.ones((2, 1, 1, 12), bool),
      np.ones((2, 1, 1, 13), np.float32),
    ):
      wrong = f"a mask that is {mask.dtype} {mask.shape}"
      _raised(wrong, pattern, apply, *qkv, mask=mask)
    _raised("scale=nan", r"scale: expected", apply, *qkv, scale=float("nan"))


def _lacks(feature: str, mechanism: Mechanism) -> bool:
  return feature not in mechanism.supports


_RECORD = (
  "`supports` must hold names that attention.plug.Attention lists, and "
  "'decode' exactly where init_cache and decode are given."
)
_REFUSED = (
  "No option may be accepted and ignored. What `supports` does not name must "
  "raise ValueError('argument: what was expected and what came; what to do "
  "instead'). `attention.arguments.accepted_options` does that for options "
  "that a function's signature does not have, `arguments.key_mask` for masks."
)
_UNKNOWN = (
  "An option that the mechanism does not have must raise, with any value. "
  "Do not catch options with **kwargs; `attention.arguments.accepted_options` "
  "reads them from the function's signature."
)
_WRONG = (
  "Arguments that do not fit must raise ValueError that names the argument, "
  "before anything is computed. `attention.arguments` has the checks: "
  "check_qkv, check_mask, key_mask, softmax_scale, or check_pairs for all."
)

CHECKS = (
  Check("record", _record, _RECORD),
  *(
    Check(
      f"refuses[{feature}]",
      partial(_refused, feature=feature),
      _REFUSED,
      where=partial(_lacks, feature),
      every_setting=False,
    )
    for feature in (
      *("causal", "cross", "mask", "full_mask"),
      *("segments", "bias", "relative", "dropout", "global"),
    )
  ),
  Check(
    "refuses[bidirectional]",
    _both_directions,
    _REFUSED,
    where=lambda mechanism: mechanism.record.causal_only,
    every_setting=False,
  ),
  *(
    Check(
      f"refuses_an_unknown_option[{value}]",
      partial(_unknown_option, value=value),
      _UNKNOWN,
      every_setting=False,
    )
    for value in (3, None, False, 0.0)
  ),
  Check(
    "refuses_wrong_arguments", _wrong_arguments, _WRONG, every_setting=False
  ),
)
