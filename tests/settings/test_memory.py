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


def test_what_does_not_fit_is_told_with_both_sizes(monkeypatch):
  monkeypatch.setattr(memory, "machine_bytes", lambda: 10**9)
  memory.check_fits("leaf", "rows", 10**9)
  with pytest.raises(ValueError, match="leaf") as info:
    memory.check_fits("leaf", "rows", 10**9 + 1)
  assert str(info.value) == (
    "leaf: rows take at least 2 GB, more than the 1 GB of memory here"
  )
  with pytest.raises(ValueError, match=r"at least 1e\+12 GB, more than"):
    memory.check_fits("leaf", "rows", 10**400)


def test_arrays_may_lie_on_devices(monkeypatch):
  assert memory.device_bytes() == 0  # A CPU's memory is the machine's.
  monkeypatch.setattr(memory, "machine_bytes", lambda: 10**9)
  monkeypatch.setattr(memory, "device_bytes", lambda: 10**10)
  memory.check_fits("leaf", "arrays", 10**10, on_devices=True)
  for num_bytes, on_devices in ((10**10, False), (10**11, True)):
    with pytest.raises(ValueError, match="leaf: arrays take at least"):
      memory.check_fits("leaf", "arrays", num_bytes, on_devices=on_devices)
