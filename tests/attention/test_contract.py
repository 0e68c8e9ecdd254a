"""Every mechanism keeps the contract, `attention.testing`."""

import pytest

from attention.testing import CHECKS
from tests.attention.forms import OWN
from tests.attention.mechanisms import MECHANISMS, ONE_EACH


def test_the_table_covers_every_mechanism():
  assert {mechanism.name for mechanism in MECHANISMS} == set(OWN)


# Mechanism by mechanism, because the checks of one share what they compile.
@pytest.mark.parametrize(
  ("mechanism", "check"),
  [
    pytest.param(
      mechanism,
      check,
      id=f"{mechanism}-{check}",
      marks=[pytest.mark.optimised] if check.bits else [],
    )
    for mechanism in MECHANISMS
    for check in CHECKS
    if check.applies(mechanism)
    and (check.every_setting or mechanism in ONE_EACH)
  ],
)
def test_contract(mechanism, check):
  check(mechanism)
