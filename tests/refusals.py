"""What is refused, and how it is told."""

import pytest


def assert_refused(call, *cases, prefix=""):
  """Each raises ValueError of one line that begins with the first of its names.

  Args:
    call: takes the values of a case by name.
    cases: values by name, of which the first is at fault.
    prefix: what stands before the name.
  """
  for values in cases:
    with pytest.raises(ValueError) as error:
      call(**values)
    told, name = str(error.value), next(iter(values))
    assert told.startswith(f"{prefix}{name}: "), f"{values}: {told}"
    assert "\n" not in told
