"""Tests of an installed library: `pytest --pyargs attention.testing`.

They need pytest, but no file of the repository. Dense attention is checked against the
whole contract. The mechanisms below are checked against their definitions, in values
and gradients of one call. The repository's test suite checks every mechanism against
the whole contract.
"""

import inspect
from typing import Any

import numpy as np
import pytest

from attention import ATTENTIONS, definitions
from attention.definitions import delta_rule, gated_linear
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
"""Hyperparameters of mechanisms whose variables are arguments of their definitions."""


def _mechanism(name: str, options: dict[str, Any]) -> Mechanism:
  """A mechanism with its definition in `attention.definitions`."""
  modules = (
    (definitions, f"{name}_attention"),
    (gated_linear, name),
    (delta_rule, name),
  )
  definition = next(getattr(x, y) for x, y in modules if hasattr(x, y))
  parameters = inspect.signature(definition).parameters
  shared = {key: value for key, value in options.items() if key in parameters}

  def define(variables, *arrays, **call):
    # Gates of a recurrence are computed from its inputs, here the keys.
    if "inputs" in parameters:
      key = np.asarray(arrays[1])
      call["inputs"] = key.reshape(*key.shape[:2], -1)
    for collection in variables.values():
      call |= collection
    return definition(*arrays, **shared, **call)

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
