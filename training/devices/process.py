"""What is set up in a process before it computes: XLA, memory, and what is kept.

XLA:CPU of jaxlib 0.10.2 to 0.12.0.1 (the newest that was tried) compiles a product
whose right operand repeats along its columns into one that reads memory that was
never written, where a reduction follows: `benchmarks/README.md` has a program
of one line. The fusion that does so can be switched off.

XLA asks malloc for the temporaries of a program at every call. Beyond 32 MiB glibc
maps such a block anew each time, and the kernel clears every page of it: 10 of the
41 ms of a step with 50 MiB on 2 cores.
"""

import ctypes
import importlib.metadata
import io
import os
import sys
from typing import Any

import jax

from attention.platform import backend
from settings import cache

# Of glibc's <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def avoid_faulty_fusion() -> None:
  """Switches the fusion off, to be called before JAX makes its first array.

  Does nothing where the variable `XLA_FLAGS` sets the flag already, and with a
  jaxlib that is right, or newer than those tried: XLA ends a process at a flag
  that it does not know.
  """
  flags, flag = os.environ.get("XLA_FLAGS", ""), backend.FUSION_FLAG
  version = importlib.metadata.version("jaxlib")
  if flag not in flags and backend.has_faulty_fusion(version):
    os.environ["XLA_FLAGS"] = f"{flags} {flag}=".strip()


def flags() -> str:
  """The flags of XLA that are set in this process, for its records."""
  return os.environ.get("XLA_FLAGS", "")


def devices() -> str:
  """The devices of JAX, for the records of a run: '1 × cpu'."""
  return f"{jax.device_count()} × {jax.devices()[0].device_kind}"


def generator() -> str:
  """How JAX draws random numbers in this process, for the records of a run."""
  values: Any = jax.config
  others = ", JAX_THREEFRY_PARTITIONABLE=false"
  is_usual = values.jax_threefry_partitionable
  return values.jax_default_prng_impl + others * (not is_usual)


def replace_signs() -> None:
  """Standard output replaces what its encoding does not have, and goes on."""
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")


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


def keep_programs() -> None:
  """Keeps compiled programs, so that a second start is quick.

  `JAX_COMPILATION_CACHE_DIR` names another folder for them.
  """
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(cache.folder("xla")))
  # The many small ones as well: 20 ms to compile, 2 ms to read.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def keep_fonts() -> None:
  """Has matplotlib keep its files in the cache, to be called before it is imported.

  `MPLCONFIGDIR`, which is matplotlib's own, names another folder for them.
  """
  os.environ.setdefault("MPLCONFIGDIR", str(cache.folder("matplotlib")))
