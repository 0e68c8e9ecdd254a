"""Freed memory stays with the process, so that a step on CPU does not fault.

XLA asks malloc for the temporaries of a program at every call. Beyond 32 MiB glibc
maps such a block anew each time, and the kernel clears every page of it: 10 of the
41 ms of a step with 50 MiB on 2 cores.
"""

import ctypes

import jax

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_freed() -> bool:
  """Lets glibc reuse all it was given, to be called before JAX makes an array.

  Only the main thread's arena holds blocks beyond 64 MiB, so JAX is told to run
  programs for the CPU there. The process then keeps its peak until it ends.

  Returns:
    whether the C library has these settings; others are left as they are.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):  # musl, macOS; Windows.
    return False
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  largest = 2**31 - 1
  settings = {
    _MMAP_THRESHOLD: largest,
    _TRIM_THRESHOLD: largest,
    _TOP_PAD: 64 * 2**20,
  }
  return all([mallopt(name, value) == 1 for name, value in settings.items()])
