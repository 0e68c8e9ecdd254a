"""Freed memory is reused: counted in page faults, in a process of its own."""

import subprocess
import sys

import pytest

_SCRIPT = """
import ctypes, resource, sys
from training import host_memory

if sys.argv[1] == "keep" and not host_memory.keep_freed():
  sys.exit(3)


def touch():
  ctypes.create_string_buffer(64 * 2**20)


touch()
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
  touch()
after = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
print((after - before) / 4)
"""


def _faults(mode: str) -> float:
  """Page faults of a block of 64 MiB that was freed and is asked for again."""
  command = [sys.executable, "-c", _SCRIPT, mode]
  done = subprocess.run(command, capture_output=True, text=True)
  if done.returncode == 3:
    pytest.skip("this C library has no such settings")
  assert done.returncode == 0, done.stderr
  return float(done.stdout)


def test_a_freed_block_is_reused_without_page_faults():
  assert _faults("keep") < 8
  # 16,384 with pages of 4 KiB, 32 with pages of 2 MiB.
  assert _faults("default") > 16
