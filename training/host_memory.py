"""Freed memory stays with the process, so that a CPU step does not fault.

XLA on CPU asks malloc for the temporaries of a program at every call, and frees
them after it. From 32 MiB up glibc maps each such block anew, and the kernel
clears every page of it again when it is first touched: a step with 50 MiB of
temporaries takes 12,800 page faults, 10 of its 41 ms (`configs/text.py`, 2 cores).
"""

import ctypes

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_LARGEST = 2**31 - 1


def keep_freed() -> bool:
  """Lets glibc reuse what it was given: no block below 2 GiB is unmapped.

  To be called before large arrays are made. The process keeps its peak until
  it ends; the peak itself is as before.

  Returns:
    whether the C library has these settings; others are left as they are.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):  # musl, macOS; Windows.
    return False
  settings = (
    (_MMAP_THRESHOLD, _LARGEST),
    (_TRIM_THRESHOLD, _LARGEST),
    (_TOP_PAD, 64 * 2**20),
  )
  return all([mallopt(name, value) == 1 for name, value in settings])
