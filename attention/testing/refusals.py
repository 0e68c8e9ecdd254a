"""What a record claims, and what a mechanism must refuse."""

from collections.abc import Iterator
import contextlib
from functools import partial
import re
from typing import Any

import jax
import jaxtyping
import numpy as np

from attention import plug
from attention.capabilities import CAPABILITIES
from attention.testing.calls import Case, require
from attention.testing.mechanism import Check, Mechanism, law


@law()
def record(mechanism: Mechanism) -> None:
  """`supports` must hold names that attention.plug.Attention lists.

  And 'decode' exactly where init_cache and decode are given.
  """
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


def _error(mechanism: Mechanism, qkv: Any, call: Any) -> Exception | None:
  """What a call raises while it is traced."""
  variables = mechanism.variables(Case().dims)
  try:
    jax.eval_shape(lambda qkv: mechanism.apply(variables, qkv, **call), qkv)
  except Exception as error:
    return error
  return None


def _raises(
  mechanism: Mechanism, name: str, pattern: str, qkv: Any, call: Any
) -> None:
  """Requires that the call `name` raises ValueError with a message like `pattern`."""
  error = _error(mechanism, qkv, call)
  require(error is not None, f"{name} is accepted, expected ValueError")
  require(
    isinstance(error, ValueError),
    f"{name} raises {type(error).__name__}({error}), expected ValueError",
  )
  require(
    re.match(pattern, str(error), re.DOTALL),
    f"{name} raises ValueError({str(error)!r}), expected a message like "
    f"{pattern!r}",
  )


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
  """No option may be accepted and ignored.

  What `supports` does not name must raise ValueError('argument: what was expected
  and what came; what to do instead'). `attention.arguments.accepted_options` does
  that for options that a function's signature does not have, `arguments.key_mask`
  for masks.
  """
  if feature == "bidirectional":
    qkv, _ = mechanism.draw(Case())
    pattern = "is_causal: expected True, .+; .+"
    call = {"is_causal": False}
    return _raises(mechanism, "is_causal=False", pattern, qkv, call)
  case, more = Case((feature,)), {}
  if feature == "dropout":
    case = Case()
    more = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}
  elif feature == "cross":
    case = Case(length=7, source_length=13)
  qkv, call = mechanism.draw(case)
  arguments = _ARGUMENTS.get(feature, feature)
  # "argument: what was expected and what came; what to do instead"
  pattern = f"({arguments}): .+; .+"
  name = f"a call with {arguments}"
  _raises(mechanism, name, pattern, qkv, call | more)


@law(every_setting=False)
def refuses_an_unknown_option(mechanism: Mechanism) -> None:
  """An option that the mechanism does not have must raise, with any value.

  Do not catch options with **kwargs; `attention.arguments.accepted_options` reads
  them from the function's signature.
  """
  qkv, _ = mechanism.draw(Case())
  for value in (3, None, False, 0.0):
    error = _error(mechanism, qkv, {"widnow": value})
    require(
      isinstance(error, TypeError | ValueError) and "widnow" in str(error),
      f"the unknown option widnow={value} gives {error!r}, expected TypeError or "
      "ValueError that names it",
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


@law(every_setting=False)
def refuses_wrong_arguments(mechanism: Mechanism) -> None:
  """What does not fit must raise ValueError that names the argument, when traced.

  `attention.arguments` has the checks: check_qkv, check_mask, key_mask,
  softmax_scale, or check_pairs for all.
  """
  qkv, _ = mechanism.draw(Case())
  query, *key, value = qkv
  wrong = [
    ("query", r"query: expected .+ got", [query[0], *key, value]),
    ("value", r"value: expected .+ got", [query, *key, value[:, :5]]),
    ("query", r"query: .*heads", [query[:, :, :3], *key, value]),
    ("query", r"(query|key|value): expected .* one", [x[:, :0] for x in qkv]),
  ]
  if key:
    less = key[0][..., :4]
    wrong.append(("key", r"key: expected .+ got", [query, less, value]))
  with _unannotated():
    for name, pattern, arrays in wrong:
      name = f"{name} of wrong shape ({[x.shape for x in arrays]})"
      _raises(mechanism, name, pattern, arrays, {})
    pattern = "mask: expected" if "mask" in mechanism.supports else "mask: "
    for mask in (
      np.ones((2, 13), bool),
      np.ones((2, 1, 1, 12), bool),
      np.ones((2, 1, 1, 13), np.float32),
    ):
      name = f"a mask that is {mask.dtype} {mask.shape}"
      _raises(mechanism, name, pattern, qkv, {"mask": mask})
    call = {"scale": float("nan")}
    _raises(mechanism, "scale=nan", r"scale: expected", qkv, call)


def _lacks(mechanism: Mechanism, feature: str) -> bool:
  return not plug.can(mechanism.record, feature)


_FEATURES = (
  *("causal", "bidirectional", "cross", "mask", "full_mask"),
  *("segments", "bias", "relative", "dropout", "global"),
)
_REFUSES = [
  Check(
    f"refuses[{feature}]",
    partial(_refused, feature=feature),
    where=partial(_lacks, feature=feature),
    every_setting=False,
  )
  for feature in _FEATURES
]

CHECKS = (
  record,
  *_REFUSES,
  refuses_an_unknown_option,
  refuses_wrong_arguments,
)
