"""Settings of a process before it computes: XLA's flags, malloc, and caches.

XLA:CPU of jaxlib 0.10.2 to 0.12.0.1 (the newest version that was tested) miscompiles a
matrix product that is followed by a reduction and whose right operand repeats along its
columns: the program reads uninitialised memory. `benchmarks/README.md` has a one-line
example. A flag disables the fusion that causes this.

XLA calls malloc for the temporaries of a program at every call. For blocks above 32
MiB, glibc maps new memory each time, and the kernel clears every page of it, which
takes 10 of the 41 ms of a step with 50 MiB on 2 cores.
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

# Constants of glibc's <malloc.h>.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def avoid_faulty_fusion() -> None:
  """Disables the faulty fusion; call it before JAX creates its first array.

  It does nothing if the variable `XLA_FLAGS` already sets the flag, or if the version
  of jaxlib is correct or was not tested: XLA aborts a process with an unknown flag.
  """
  flags, flag = os.environ.get("XLA_FLAGS", ""), backend.FUSION_FLAG
  version = importlib.metadata.version("jaxlib")
  if flag not in flags and backend.has_faulty_fusion(version):
    os.environ["XLA_FLAGS"] = f"{flags} {flag}=".strip()


def flags() -> str:
  """Returns the XLA flags of this process, for the records of a run."""
  return os.environ.get("XLA_FLAGS", "")


def devices() -> str:
  """Returns the devices of JAX, for the records of a run: '1 × cpu'."""
  return f"{jax.device_count()} × {jax.devices()[0].device_kind}"


def generator() -> str:
  """JAX's random number generator in this process, for the records of a run."""
  values: Any = jax.config
  others = ", JAX_THREEFRY_PARTITIONABLE=false"
  is_usual = values.jax_threefry_partitionable
  return values.jax_default_prng_impl + others * (not is_usual)


def replace_unencodable() -> None:
  """Lets standard output replace characters that its encoding does not have."""
  if isinstance(sys.stdout, io.TextIOWrapper):
    sys.stdout.reconfigure(errors="replace")


def keep_freed_memory() -> bool:
  """Lets glibc reuse freed memory; call it before JAX creates its first array.

  Only the main thread's arena can hold blocks above 64 MiB, so CPU programs of JAX run
  in the main thread. The process keeps its peak memory until it ends.

  Returns:
    Whether the C library has these settings; without them, the function has no effect.
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


def cache_programs() -> None:
  """Caches compiled programs on disk, so that later starts are fast.

  The variable `JAX_COMPILATION_CACHE_DIR` sets another folder.
  """
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(cache.folder("xla")))
  # Also small programs, which take 20 ms to compile and 2 ms to read.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def cache_fonts() -> None:
  """Sets the cache folder of matplotlib; call it before matplotlib is imported.

  Matplotlib's variable `MPLCONFIGDIR` sets another folder.
  """
  os.environ.setdefault("MPLCONFIGDIR", str(cache.folder("matplotlib")))
