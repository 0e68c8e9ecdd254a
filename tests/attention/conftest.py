"""Fixtures of the attention tests."""

import pytest

from attention import sliding_window_blocks


@pytest.fixture
def short_blocks(monkeypatch):
  """Blocks of 8 queries, so that short sequences run over several."""
  monkeypatch.setattr(sliding_window_blocks, "BLOCK", 8)
