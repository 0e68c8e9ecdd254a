"""Tests of an installed library: `pytest --pyargs attention.testing`.

They need pytest, but no file of the repository. Dense attention is checked against the
whole contract; the mechanisms below are checked against their definitions in one call
each, in values and gradients. The repository's test suite checks every mechanism
against the whole contract.
"""

import inspect
from typing import Any

import numpy as np
import pytest

from attention import ATTENTIONS, definitions
from attention.definitions import recurrent
from attention.testing import CHECKS, Mechanism

_MECHANISMS: dict[str, dict[str, Any]] = {
  "flash": {"block_size": (8, 5)},
  "sliding_window": {"window": 3},
  "linear": {},
  "performer": {"num_features": 16},
  "linformer": {"rank": 5},
  "multiplicative": {"general": False},
  "retention": {},
  "gated_delta": {},
  "stick_breaking": {},
}
"""Options of mechanisms whose variables are arguments of their definitions."""


def _mechanism(name: str, options: dict[str, Any]) -> Mechanism:
  """A mechanism with its definition in `attention.definitions`."""
  own = f"{name}_attention"
  is_recurrent = not hasattr(definitions, own)
  definition = getattr(recurrent, name) if is_recurrent else None
  definition = definition or getattr(definitions, own)
  taken = inspect.signature(definition).parameters
  settings = {key: value for key, value in options.items() if key in taken}

  def define(variables, *arrays, **call):
    # Gates of a recurrence are computed from its inputs, here the keys.
    if "inputs" in taken:
      key = np.asarray(arrays[1])
      call["inputs"] = key.reshape(*key.shape[:2], -1)
    for part in variables.values():
      call |= part
    return definition(*arrays, **settings, **call)

  return Mechanism(ATTENTIONS[name], define, options)


_DENSE = _mechanism("dense", {})


@pytest.mark.parametrize(
  "check", [check for check in CHECKS if check.applies(_DENSE)], ids=str
)
def test_dense_attention_keeps_the_contract(check):
  """Each law is a separate test."""
  check(_DENSE)


@pytest.mark.parametrize("name", _MECHANISMS)
def test_mechanism_equals_its_definition(name):
  """Values and gradients of a call with options, causal if that is supported."""
  mechanism = _mechanism(name, _MECHANISMS[name])
  is_causal = "causal" in mechanism.supports
  law = f"value_and_gradient[{'causal' if is_causal else 'options'}]"
  (check,) = [check for check in CHECKS if check.name == law]
  check(mechanism)
