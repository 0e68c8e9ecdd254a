"""Fixtures of the attention tests."""

import pytest

from attention.platform import backend


@pytest.fixture
def short_blocks(monkeypatch):
  """Sets blocks of 8 queries, so that short sequences have several."""
  monkeypatch.setattr(backend, "WINDOW_ROWS", (8, 8))
