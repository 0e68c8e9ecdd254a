"""Every mechanism keeps the contract, `attention.testing`."""

import pytest

from attention.testing import CHECKS
from tests.attention.forms import DERIVED, KINDS, OWN
from tests.attention.mechanisms import MECHANISMS, ONE_EACH


def test_the_table_covers_every_mechanism():
  assert {mechanism.name for mechanism in MECHANISMS} == set(OWN)


_ONE_OF_A_KIND = {*KINDS, "kimi_delta", "latent"}
_OF_KINDS = (
  "eager_equals_jit",
  "sharded_batch",
  "vmap_of_scanned_checkpoints",
)
"""Laws of JAX's transformations that compile much."""


def _marks(mechanism, check):
  """Of each code, one setting meets every law, and others a law of values."""
  marks = [pytest.mark.optimised] if check.bits else []
  is_causal = mechanism.directions[-1]
  case = "causal" if is_causal else "options"
  kept = (f"value_and_gradient[{case}]", "decoding_equals_the_causal_call")
  is_first = mechanism in ONE_EACH and mechanism.name not in DERIVED
  # A long causal call has what another long one has, and what crosses its blocks.
  is_covered = is_causal and check.name == "value_and_gradient[long]"
  if check.name in _OF_KINDS:
    is_covered = mechanism.name not in _ONE_OF_A_KIND
  if (not is_first and check.name not in kept) or is_covered:
    marks.append(pytest.mark.thorough)
  return marks


# Mechanism by mechanism, because the checks of one share what they compile.
@pytest.mark.parametrize(
  ("mechanism", "check"),
  [
    pytest.param(
      mechanism,
      check,
      id=f"{mechanism}-{check}",
      marks=_marks(mechanism, check),
    )
    for mechanism in MECHANISMS
    for check in CHECKS
    if check.applies(mechanism)
    and (check.every_setting or mechanism in ONE_EACH)
  ],
)
def test_contract(mechanism, check):
  check(mechanism)
