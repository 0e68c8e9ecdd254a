"""Laws of declared capabilities, and of calls that a mechanism must refuse."""

from functools import partial
import re
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np

from attention.mechanism import CAPABILITIES, can
from attention.testing.calls import Case, require
from attention.testing.mechanism import LAWS, Check, Mechanism, law


@law()
def record(mechanism: Mechanism) -> None:
  """`supports` must have only names that attention.mechanism.Attention lists.

  It must have 'decode' if and only if init_cache and decode are not None.
  """
  supports = mechanism.supports
  unknown = ", ".join(sorted(supports.difference(CAPABILITIES)))
  require(not unknown, f"`supports` has unknown names: {unknown}")
  decodes = "decode" in supports
  for name in ("init_cache", "decode"):
    is_given = getattr(mechanism.record, name) is not None
    require(
      is_given == decodes,
      f"`supports` has {'' if decodes else 'no '}'decode', and {name} is "
      f"{'given' if is_given else 'None'}",
    )
  require(
    "causal" in supports or not decodes,
    "`supports` has 'decode' without 'causal'",
  )


def _error(mechanism: Mechanism, qkv: Any, call: Any) -> Exception | None:
  """The exception that a call raises during tracing, or None."""
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
  matches = re.match(pattern, str(error), re.DOTALL)
  require(
    isinstance(error, ValueError) and matches,
    f"{name} raises {type(error).__name__}({str(error)!r}), expected "
    f"ValueError with a message like {pattern!r}",
  )


# Maps capabilities to the names of their arguments, the drawn call, and more options.
_REFUSED = {
  "causal": ("is_causal", Case(("causal",)), {}),
  "bidirectional": ("is_causal", Case(), {"is_causal": False}),
  "cross": ("key|query|value", Case(length=7, source_length=13), {}),
  "mask": ("mask", Case(("mask",)), {}),
  "full_mask": ("mask", Case(("full_mask",)), {}),
  "segments": ("query_segment_ids|key_segment_ids", Case(("segments",)), {}),
  "bias": ("bias", Case(("bias",)), {}),
  "relative": ("relative_bias|relative_keys", Case(("relative",)), {}),
  "dropout": ("dropout_rate|dropout_rng", Case(), {"dropout_rate": 0.1}),
  "global": ("global_indices", Case(("global",)), {}),
}


def _refused(mechanism: Mechanism, feature: str) -> None:
  """No option may be accepted and ignored.

  An option that `supports` does not name must raise ValueError('argument: expected
  this, got that; advice'). `attention.mechanism.accepted_options` does this for options
  that a function's signature does not have, and `checks.key_mask` does it for masks.
  """
  arguments, case, options = _REFUSED[feature]
  if feature == "dropout":
    options = {**options, "dropout_rng": jax.random.key(0)}
  qkv, call = mechanism.draw(case)
  call = {
    k: jnp.asarray(x) if isinstance(x, np.ndarray) else x
    for k, x in call.items()
  }
  name = f"a call with {arguments}"
  _raises(mechanism, name, f"({arguments}): .+; .+", qkv, call | options)


def _lacks(mechanism: Mechanism, feature: str) -> bool:
  return not can(mechanism.record, feature)


LAWS += [
  Check(
    f"refuses[{feature}]",
    partial(_refused, feature=feature),
    where=partial(_lacks, feature=feature),
    every_setting=False,
  )
  for feature in _REFUSED
]


@law(
  every_setting=False,
  where=lambda mechanism: not {"value_heads", "own_keys"} & mechanism.supports,
)
def refuses_values_of_more_heads(mechanism: Mechanism) -> None:
  """Values with more heads than queries and keys must raise ValueError.

  Otherwise `supports` must have 'value_heads'.
  """
  qkv, _ = mechanism.draw(Case(num_kv_heads=4))
  *qk, value = qkv
  arrays = [*(x[:, :, ::2] for x in qk), value]
  name = f"a call of {[x.shape for x in arrays]}"
  _raises(mechanism, name, r"(query|key|value): .+", arrays, {})


@law()
def refuses_a_missing_gate(mechanism: Mechanism) -> None:
  """A call without one of its `gates` must raise a ValueError that names the gate."""
  qkv, _ = mechanism.draw(Case())
  variables = mechanism.variables(Case().dims)
  attention = mechanism.factory(**mechanism.options)
  arrays = list(mechanism.three(qkv))
  if "own_keys" in attention.supports:
    arrays[1] = None
  gates = mechanism.gates(qkv)
  for name in gates:
    rest = {gate: x for gate, x in gates.items() if gate != name}
    try:
      jax.eval_shape(
        lambda x, y: attention.apply(variables, *x, **y), arrays, rest
      )
      error = None
    except Exception as raised:
      error = raised
    require(
      isinstance(error, ValueError) and name in str(error),
      f"a call without the gate {name} gives {error!r}, expected ValueError that "
      "names it",
    )


@law(every_setting=False)
def refuses_an_unknown_option(mechanism: Mechanism) -> None:
  """An unknown option must raise an error, with any value.

  Do not ignore options in **kwargs; `attention.mechanism.accepted_options` checks
  them against the function's signature.
  """
  qkv, _ = mechanism.draw(Case())
  for value in (3, None, False, 0.0):
    error = _error(mechanism, qkv, {"widnow": value})
    require(
      isinstance(error, TypeError | ValueError) and "widnow" in str(error),
      f"the unknown option widnow={value} gives {error!r}, expected TypeError or "
      "ValueError that names it",
    )


@law(every_setting=False)
def refuses_wrong_arguments(mechanism: Mechanism) -> None:
  """Wrong arguments must raise a ValueError that names the argument, during tracing.

  `attention.checks` has the checks: check_qkv, check_mask, key_mask,
  softmax_scale, or check_pairs for all of them.
  """
  qkv, _ = mechanism.draw(Case())
  query, *key, value = qkv
  wrong = [
    (r"query: expected .+ got", [query[0], *key, value], {}),
    (r"value: expected .+ got", [query, *key, value[:, :5]], {}),
    (r"query: .*heads", [query[:, :, :3], *key, value], {}),
    (r"(query|key|value): expected .* one", [x[:, :0] for x in qkv], {}),
    (r"scale: expected", qkv, {"scale": float("nan")}),
  ]
  for i, array in enumerate(qkv):
    float8 = [*qkv[:i], array.astype(jnp.float8_e4m3fn), *qkv[i + 1 :]]
    wrong.append((r"(query|key|value): .* at least 16 bits", float8, {}))
  if key:
    narrow = [query, key[0][..., :4], value]
    wrong.append((r"key: expected .+ got", narrow, {}))
  pattern = "mask: expected" if "mask" in mechanism.supports else "mask: "
  for shape, dtype in (
    ((2, 13), bool),
    ((2, 1, 1, 12), bool),
    ((2, 1, 1, 13), np.float32),
  ):
    wrong.append((pattern, qkv, {"mask": np.ones(shape, dtype)}))
  # Without jaxtyping, so that wrong arguments reach the function's own checks.
  is_disabled = jaxtyping.config.jaxtyping_disable
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    for pattern, arrays, call in wrong:
      name = f"a call of {[x.shape for x in arrays]} and wrong {[*call]}"
      _raises(mechanism, name, pattern, arrays, call)
  finally:
    jaxtyping.config.update("jaxtyping_disable", is_disabled)
