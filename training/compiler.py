"""The flag of XLA without which some programs for a CPU return garbage.

XLA:CPU of jaxlib 0.10.2 to 0.12.0.1 (the newest that was tried) compiles a product
whose right operand repeats along its columns into one that reads memory that was
never written, where a reduction follows: `benchmarks/README.md` has a program
of one line. The fusion that does so can be switched off.
"""

import importlib.metadata
import os

FLAG = "--xla_cpu_experimental_ynn_fusion_type"

_FIRST_FAULTY = (0, 10, 2)
_LAST_TRIED = (0, 12, 0, 1)


def avoid_faulty_fusion() -> None:
  """Switches the fusion off, to be called before JAX makes its first array.

  Does nothing where the variable `XLA_FLAGS` sets the flag already, and with a
  jaxlib that is right, or newer than those tried: XLA ends a process at a flag
  that it does not know.
  """
  flags = os.environ.get("XLA_FLAGS", "")
  if FLAG not in flags and is_faulty(importlib.metadata.version("jaxlib")):
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}=".strip()


def is_faulty(version: str) -> bool:
  """Whether a version of jaxlib, as '0.10.2', has the fault."""
  numbers = tuple(int(x) for x in version.split(".")[:4] if x.isdigit())
  return _FIRST_FAULTY <= numbers <= _LAST_TRIED


def flags() -> str:
  """The flags of XLA that are set in this process, for its records."""
  return os.environ.get("XLA_FLAGS", "")
