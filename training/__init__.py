"""Training: config, state, step, devices, checkpoints, metrics and the loop.

This package names no task, model or attention mechanism. Importing it disables an XLA
fusion that returns wrong results (`training.devices.process`), for every program,
notebook and test that uses it. If packages are missing, the import prints one line that
says how to install them.
"""

import importlib.util
import sys
import warnings

for package in ("absl", "jaxlib"):
  if importlib.util.find_spec(package) is None:
    sys.exit(
      f"{package} is not installed for {sys.executable}; `make setup` creates .venv, "
      "whose .venv/bin/python has all packages"
    )

# `attention` warns about the fusion, which is disabled at the end of this file.
with warnings.catch_warnings():
  warnings.simplefilter("ignore", RuntimeWarning)
  from training.devices import process

process.avoid_faulty_fusion()
