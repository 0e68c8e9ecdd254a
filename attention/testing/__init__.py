"""The contract of attention mechanisms, as checks for your own mechanism.

`check_mechanism(factory, definition)` checks a mechanism against the contract that all
mechanisms of this library satisfy. `CHECKS` lists the checks, so that a test suite can
run each of them as a separate test.

`check_function(function)` checks an attention function of any library against
`FUNCTION_LAWS`, the laws that need no definition. `python -m attention.testing` does
the same on the command line.
"""

from attention.testing.calls import Case, assert_close
from attention.testing.contract import CHECKS, check_mechanism
from attention.testing.function import Function, check_function, run_laws
from attention.testing.function_laws import FUNCTION_LAWS
from attention.testing.mechanism import Check, Mechanism

__all__ = [
  "CHECKS",
  "FUNCTION_LAWS",
  "Case",
  "Check",
  "Function",
  "Mechanism",
  "assert_close",
  "check_function",
  "check_mechanism",
  "run_laws",
]
