"""The contract of an attention mechanism, as checks to run on one's own.

`check_mechanism(factory, definition)` in a test holds a mechanism to what all
mechanisms of this library are held to. `CHECKS` is the same contract as a list,
so that a suite can run each check as a test of its own.
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
