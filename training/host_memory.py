"""Freed memory stays with the process, so that a step on CPU does not fault.

XLA asks malloc for the temporaries of a program at every call and frees them
after it. Beyond 32 MiB glibc maps such a block anew each time, and the kernel
clears every page of it when it is first touched. Measured on 2 cores: 12,800 page
faults and 10 of the 41 ms of a step with 50 MiB (`configs/text.py`), 47,000 and 30
of 127 ms with 179 MiB (`configs/translation.py`).
"""

import ctypes
import sys

import jax

RSS_UNIT = 1 if sys.platform == "darwin" else 1024
"""Bytes of the unit in which a process is told its largest resident size."""

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3

_LARGEST = 2**31 - 1


def keep_freed() -> bool:
  """Lets glibc reuse all it was given, and has JAX ask from the main thread.

  Only the main thread's arena holds blocks beyond 64 MiB; programs that JAX
  dispatches asynchronously to the CPU allocate on other threads. One arena for
  all threads would do as well, but they wait for one another: 8 % of a step.

  To be called before JAX makes its first array. The process then keeps its peak
  until it ends. Devices but the CPU stay asynchronous.

  Returns:
    whether the C library has these settings; others are left as they are.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):  # musl, macOS; Windows.
    return False
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  settings = (
    (_MMAP_THRESHOLD, _LARGEST),
    (_TRIM_THRESHOLD, _LARGEST),
    (_TOP_PAD, 64 * 2**20),
  )
  return all([mallopt(name, value) == 1 for name, value in settings])
