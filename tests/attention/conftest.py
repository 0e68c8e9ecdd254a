"""Fixtures of the attention tests."""

import jaxtyping
import pytest


@pytest.fixture
def without_jaxtyping():
  """Shape annotations unchecked, to see the functions' own errors."""
  jaxtyping.config.update("jaxtyping_disable", True)
  yield
  jaxtyping.config.update("jaxtyping_disable", False)
