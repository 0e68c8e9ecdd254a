"""How the suite compiles: quickly, or as users do where a test is about that.

Compiling is most of the suite's time, and quick options take three quarters of it.
They change no law but by rounding. Memory and the compiler's own faults are those of
the programs that users have: such a test gives `AS_USERS` to the compilation.

    jax.jit(function).lower(*arrays).compile(compiler_options=compiling.AS_USERS)
"""

import importlib.metadata
import os

FULLY = os.environ.get("COMPILE") == "fully"
"""Whether all tests compile as users do; `make test-all` asks for it."""

# Option: (quick, XLA's own).
_OPTIONS = {
  "xla_backend_optimization_level": (0, 3),
  "xla_llvm_disable_expensive_passes": (True, False),
}
if importlib.metadata.version("jaxlib").startswith("0.10."):
  # XLA of jax 0.12 has no such options, and stops at one that it does not know.
  _OPTIONS |= {
    "xla_cpu_use_fusion_emitters": (False, True),
    "xla_cpu_parallel_codegen_split_count": (1, 32),
  }

AS_USERS = {name: full for name, (_, full) in _OPTIONS.items()}
"""Compiler options of one program."""


def flags() -> list[str]:
  """Of XLA_FLAGS, for a process whose programs compile quickly."""
  return [f"--{k}={str(quick).lower()}" for k, (quick, _) in _OPTIONS.items()]
