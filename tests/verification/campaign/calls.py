"""Compares random calls of mechanisms with their definitions."""

import re

import jax.numpy as jnp
import numpy as np

from attention.testing.calls import Case, assert_close
from attention.testing.values import value_and_gradient
from tests.attention.mechanisms import MECHANISMS
from tests.verification.campaign.faults import fault

_OPTIONS = (
  *("scale", "segments", "bias", "relative_bias", "relative_keys", "sinks"),
  *(
    "relative_queries_by_head",
    "logits_soft_cap",
    "log_forget",
    "global",
    "global_qkv",
  ),
)


def random_case(rng, mechanism):
  """Draws a case that the mechanism claims to support."""
  kv_heads, length = int(rng.integers(1, 4)), int(rng.integers(1, 40))
  if rng.random() < 0.2:
    length = int(rng.choice([63, 64, 65, 127, 150, 200]))
  options = [x for x in _OPTIONS if rng.random() < 0.25]
  options += [str(rng.choice(["mask", "full_mask", "scale"]))]
  if rng.random() < 0.5 or True not in mechanism.directions:
    options = [x for x in options if x != "log_forget"]
  elif "causal" in mechanism.supports:
    options.append("causal")
  is_cross = "cross" in mechanism.supports and rng.random() < 0.3
  return Case(
    options=tuple(dict.fromkeys(options)),
    length=length,
    source_length=int(rng.integers(1, 40)) if is_cross else None,
    num_kv_heads=kv_heads,
    value_dim=int(rng.integers(1, 12)),
    batch=int(rng.integers(1, 4)),
    num_heads=kv_heads * int(rng.integers(1, 4)),
    head_dim=int(rng.integers(1, 12)),
  ).limited(mechanism.supports)


@fault(
  "a random call of a mechanism",
  1000 * len(MECHANISMS),
  "values and gradients equal the definition's, or one ValueError",
)
def call(rng, folder):
  """Compares values and gradients; one call in five has 16 bits, and only values."""
  del folder
  mechanism = MECHANISMS[rng.integers(len(MECHANISMS))]
  case = random_case(rng, mechanism)
  try:
    if rng.random() < 0.2:
      compare_in_16_bits(
        mechanism, case, rng.choice([jnp.bfloat16, jnp.float16])
      )
    else:
      value_and_gradient(mechanism, case)
  except ValueError as error:
    if re.match(r"[\w|, ]+: .+", str(error)):
      return "refused"
    raise AssertionError(f"{mechanism} {case!r}: {error}") from error
  except Exception as error:
    raise AssertionError(f"{mechanism} {case!r}: {error}") from error
  return ""


def compare_in_16_bits(mechanism, case, dtype):
  """Requires values within 2e-2 of the definition's, for rounded arguments."""
  qkv, call = mechanism.draw(case)
  qkv = [jnp.asarray(x, dtype) for x in qkv]
  variables = mechanism.variables(case.dims)
  out = mechanism.apply(variables, qkv, **call)
  expected = mechanism.define(variables, qkv, **call)
  assert out.dtype == dtype, out.dtype
  assert_close(np.asarray(out, np.float32), expected, 2e-2)
