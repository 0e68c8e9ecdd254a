"""Small mechanisms of this project in every form, full and causal."""

import pytest

import attention
from attention import ATTENTIONS
from attention import mechanism as mechanisms

OWN = {
  name: factory
  for name, factory in ATTENTIONS.items()
  if factory.__module__.startswith("attention.")
}
"""Without mechanisms that a user has added to the registry."""

_SMALL = {
  "sliding_window": {"window": 5},
  "window_2d": {"window": 3, "shift": 1},
  "bigbird": {"block_size": 8, "num_random": 1},
  "performer": {"num_features": 16},
  "window_linear": {"window": 5},
  "linformer": {"rank": 8},
  "lsh": {"chunk_size": 8, "num_rounds": 2},
  "nystrom": {"num_landmarks": 8},
  "additive": {"width": 8},
}
SIZES = {
  name: _SMALL.get(name, dict(mechanisms.example(factory).sizes.short))
  for name, factory in OWN.items()
}
"""Hyperparameters for tens of positions; by default the record's own."""

RECURRENT = [
  name
  for name, factory in OWN.items()
  if mechanisms.example(factory).apply.__module__ == "attention.recurrent.gates"
]
"""Those with a state: they read gates, and have no block size."""

DERIVED = {*RECURRENT, "differential"} - {
  "mamba2",
  "mamba3",
  "kimi_delta",
  "mesa",
  "log_linear",
}
"""Whose code is another's: one of these, or dense attention twice."""

FUNCTIONS = {
  name: getattr(attention, f"{name}_attention")
  for name in OWN
  if name not in RECURRENT
}
"""The attention function of each mechanism that has one of its own."""

FORMS = [
  (name, is_causal)
  for name, factory in OWN.items()
  for is_causal in mechanisms.directions(factory())
]

KINDS = ("dense", "sliding_window", "performer", "linformer", "lsh")
"""One of each kind for the code around a mechanism: without variables, with a
ring as its cache, with constants, with parameters, with query and key in one."""


def thorough(*cases):
  """Tuples of parameters for `make test-all` alone."""
  return [pytest.param(*case, marks=pytest.mark.thorough) for case in cases]


def kinds_first(names, *others):
  """Parameters of a test: all names, most of those beyond `KINDS` `thorough`.

  For tests of the code around a mechanism; the contract is about each of them.
  `others` are names that the test is about as well, and are not marked.
  """
  kept = (*KINDS, *others)
  return [
    pytest.param(name, marks=[] if name in kept else pytest.mark.thorough)
    for name in names
  ]
