"""Sets the compiler options of the test suite.

Compilation takes most of the suite's time, and quick options reduce it by a quarter.
They change results only by rounding. A test of memory or of compiler faults needs the
programs that users have, so it passes `AS_USERS` to the compilation:

    jax.jit(function).lower(*arrays).compile(compiler_options=compiling.AS_USERS)
"""

import importlib.metadata
import os

FULLY = os.environ.get("COMPILE") == "fully"
"""Whether all tests compile with the options of users, as in `make test-all`."""

# Option -> (quick value, default).
_OPTIONS = {
  "xla_backend_optimization_level": (0, 3),
  "xla_llvm_disable_expensive_passes": (True, False),
}
if importlib.metadata.version("jaxlib").startswith("0.10."):
  # XLA of jax 0.12 does not have these options, and rejects unknown ones.
  _OPTIONS |= {
    "xla_cpu_use_fusion_emitters": (False, True),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
  }

AS_USERS = {name: full for name, (_, full) in _OPTIONS.items()}
"""Compiler options of users, for a single program."""


def flags() -> list[str]:
  """Returns the XLA flags of quick compilation."""
  return [f"--{k}={str(quick).lower()}" for k, (quick, _) in _OPTIONS.items()]
