"""Settings of the whole suite: eight simulated devices, no silent broadcasting.

The environment is set before JAX is imported. Unless COMPILE=quickly, the shapes
in the annotations of `attention` are checked at run time.
"""

import ctypes
import gc
import importlib.metadata
import os
import pathlib

# Compiling is most of the suite's time, and these flags take three quarters of
# it. `make test` asks for them, except for tests marked `optimised`: laws about
# bits and memory, which hold for programs as users compile them.
_QUICK = [
  "--xla_backend_optimization_level=0",
  "--xla_llvm_disable_expensive_passes=true",
]
if importlib.metadata.version("jaxlib").startswith("0.10."):
  # XLA of jax 0.12 has no such flag, and stops at one that it does not know.
  _QUICK += [
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
  ]

_QUICKLY = os.environ.get("COMPILE") == "quickly"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_force_host_platform_device_count=8",
    *(_QUICK if _QUICKLY else []),
  ]
)

import training  # noqa: F401 - adds the flag that every program has

import jax  # isort: skip
import jaxtyping
import pytest

from tasks import cache

jax.config.update("jax_numpy_rank_promotion", "raise")
# Compiled programs are kept between runs of the suite, of any checkout: with them it
# takes two thirds of its time.
jax.config.update("jax_compilation_cache_dir", str(cache.folder("xla-tests")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

# Checking the annotations takes a quarter of the time of tracing. Tests marked
# `optimised` call every mechanism with every option, so `make test` checks there.
if not _QUICKLY:
  jaxtyping.install_import_hook(["attention"], "beartype.beartype")


# Programs are many objects that live long. With Python's own thresholds, looking
# through them again and again takes a tenth of the suite's time.
gc.freeze()
gc.set_threshold(100_000, 50, 100)

# Programs of single operations serve many files: a worker that forgets them after
# each file takes an eighth longer. Those of 25 files take 4.5 GB, so it forgets all
# at 2 GB. If it kept the memory, it would forget them after each later file.
_MOST_PAGES = 2 * 2**30 // os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def _forget_programs():
  """Frees what has been compiled, where a worker has grown by it."""
  yield
  resident = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
  if resident > _MOST_PAGES:
    jax.clear_caches()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture
def unchecked():
  """Lets a wrong argument through to the function's own checks."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
