"""Every mechanism keeps the contract, `attention.testing`."""

import pytest

from attention.testing import CHECKS
from tests.attention.forms import OWN
from tests.attention.mechanisms import MECHANISMS, ONE_EACH

_OF_SETTINGS = (
  "value_and_gradient[options]",
  "value_and_gradient[causal]",
  "decoding_equals_the_causal_call",
  "decoding_from_a_prompt",
)


def test_the_table_covers_every_mechanism():
  assert {mechanism.name for mechanism in MECHANISMS} == set(OWN)


def _marks(mechanism, check):
  """Of a mechanism, one setting meets every law, and others those of values."""
  if check.bits:
    return [pytest.mark.optimised]
  others = mechanism not in ONE_EACH and check.name not in _OF_SETTINGS
  return [pytest.mark.thorough] if others else []


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
