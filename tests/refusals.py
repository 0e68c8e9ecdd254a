"""Checks the errors of refused arguments."""

import pytest


def assert_refused(call, *cases, prefix=""):
  """Asserts that calls raise ValueError with one line that starts with a name.

  Args:
    call: a function of keyword arguments.
    cases: keyword arguments, the first of which the error must name, or a pair of the
      expected name and keyword arguments.
    prefix: a text before the name.
  """
  for case in cases:
    name, values = case if isinstance(case, tuple) else (next(iter(case)), case)
    with pytest.raises(ValueError) as error:
      call(**values)
    message = str(error.value)
    assert message.startswith(f"{prefix}{name}: "), f"{values}: {message}"
    assert "\n" not in message
