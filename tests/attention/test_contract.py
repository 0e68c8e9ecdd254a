"""Every mechanism keeps the contract, `attention.testing`."""

import pytest

from attention.testing import CHECKS
from tests.attention.forms import OWN
from tests.attention.mechanisms import MECHANISMS, ONE_EACH


def test_the_table_covers_every_mechanism():
  assert {mechanism.name for mechanism in MECHANISMS} == set(OWN)


def _marks(mechanism, check):
  """Of a mechanism, one setting meets every law, and others a law of values."""
  marks = [pytest.mark.optimised] if check.bits else []
  case = "causal" if mechanism.directions[-1] else "options"
  kept = (f"value_and_gradient[{case}]", "decoding_equals_the_causal_call")
  if mechanism not in ONE_EACH and check.name not in kept:
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
