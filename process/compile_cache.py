"""Compiled programs are kept on disk, so that a second start is quick."""

import os
import pathlib

import jax


def enable() -> None:
  """Keeps compiled programs under `~/.cache/attention-lab/xla`.

  `JAX_COMPILATION_CACHE_DIR` names another folder.
  """
  if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    folder = pathlib.Path.home() / ".cache" / "attention-lab" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
