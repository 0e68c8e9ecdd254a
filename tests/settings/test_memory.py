"""What does not fit into memory is refused by one rule."""

import sys

import pytest

from settings import memory


def test_the_memory_of_the_machine_is_known():
  assert 2**28 < memory.machine_bytes() <= sys.maxsize


@pytest.mark.parametrize("error", [OSError, ValueError, AttributeError])
def test_a_system_that_does_not_tell_refuses_nothing(monkeypatch, error):
  def sysconf(name):
    raise error

  monkeypatch.setattr(memory.os, "sysconf", sysconf, raising=False)
  memory.check_fits("leaf", "rows", 10**18)


def test_what_does_not_fit_is_told_with_both_sizes():
  memory.check_fits("leaf", "rows", 10**9, 10**9)
  with pytest.raises(ValueError, match="leaf") as info:
    memory.check_fits("leaf", "rows", 10**9 + 1, 10**9)
  assert str(info.value) == (
    "leaf: rows take at least 2 GB, more than the 1 GB of memory here"
  )
  with pytest.raises(ValueError, match=r"at least 1e\+12 GB, more than"):
    memory.check_fits("leaf", "rows", 10**400)
