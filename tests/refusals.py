"""What is refused, and how it is told."""

import pytest


def assert_refused(call, *cases, prefix=""):
  """Each raises ValueError of one line that begins with a name.

  Args:
    call: takes the values of a case.
    cases: values by name, of which the first is at fault; or another name and them.
    prefix: what stands before the name.
  """
  for case in cases:
    name, values = case if isinstance(case, tuple) else (next(iter(case)), case)
    with pytest.raises(ValueError) as error:
      call(**values)
    told = str(error.value)
    assert told.startswith(f"{prefix}{name}: "), f"{values}: {told}"
    assert "\n" not in told
