"""What is kept between runs, all of it in one folder.

Compiled programs, prepared data sets, vocabularies and matplotlib's list of
fonts. Nothing else is written outside the folder of a run.
"""

import os
import pathlib

VARIABLE = "ATTENTION_LAB_CACHE"
"""Environment variable that names the folder; `~/.cache/attention-lab` if not."""


def folder(kind: str) -> pathlib.Path:
  """Where one kind of thing is kept; nothing is made.

  Args:
    kind: 'xla', 'datasets', …: a folder inside that of all.
  """
  root = os.environ.get(VARIABLE) or "~/.cache/attention-lab"
  return pathlib.Path(root).expanduser().absolute() / kind


def keep_programs() -> None:
  """Keeps compiled programs, so that a second start is quick.

  `JAX_COMPILATION_CACHE_DIR` names another folder for them.
  """
  import jax

  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    jax.config.update("jax_compilation_cache_dir", str(folder("xla")))
  # The many small ones as well: 20 ms to compile, 2 ms to read.
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def keep_fonts() -> None:
  """Has matplotlib keep its files here, to be called before it is imported.

  `MPLCONFIGDIR`, which is matplotlib's own, names another folder for them.
  """
  os.environ.setdefault("MPLCONFIGDIR", str(folder("matplotlib")))
