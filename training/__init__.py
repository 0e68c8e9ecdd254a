"""Training: config, state, step, devices, checkpoints, metrics and the loop.

Nothing here knows a task, a model or an attention mechanism by name. Importing it
switches off a fusion of XLA that returns garbage (`training.devices.process`), so that every
program of the laboratory, a notebook and a test have right numbers. Where the
environment has no packages, it says in one line how to get them.
"""

import importlib.util
import sys
import warnings

for package in ("absl", "jaxlib"):
  if importlib.util.find_spec(package) is None:
    sys.exit(
      f"{package} is not installed for {sys.executable}; `make setup` makes .venv, "
      "and .venv/bin/python has everything"
    )

# `attention` warns of the fusion, which is switched off below.
with warnings.catch_warnings():
  warnings.simplefilter("ignore", RuntimeWarning)
  from training.devices import process

process.avoid_faulty_fusion()
