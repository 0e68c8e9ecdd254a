"""Fixtures of the attention tests."""

import pytest

from attention.platform import backend


@pytest.fixture
def short_blocks(monkeypatch):
  """Blocks of 8 queries, so that short sequences run over several."""
  monkeypatch.setattr(backend, "window_rows", lambda width: 8)


@pytest.fixture
def tiny_tiles(monkeypatch):
  """Makes all tiles of a platform tiny, when it is called."""

  def shrink(rows):
    monkeypatch.setattr(backend, "LEAST_ROWS", rows)
    monkeypatch.setattr(backend, "DIAGONAL_ROWS", rows)

  return shrink
