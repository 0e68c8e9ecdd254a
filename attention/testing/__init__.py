"""The contract of attention mechanisms, as checks for your own mechanism.

`check_mechanism(factory, definition)` checks a mechanism against the contract that all
mechanisms of this library satisfy. `CHECKS` lists the checks, so that a test suite can
run each of them as a separate test.
"""

from attention.testing.calls import Case, assert_close
from attention.testing.contract import CHECKS, check_mechanism
from attention.testing.mechanism import Check, Mechanism

__all__ = [
  "CHECKS",
  "Case",
  "Check",
  "Mechanism",
  "assert_close",
  "check_mechanism",
]
