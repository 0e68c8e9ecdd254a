"""Fixtures of the attention tests."""

import gc

import pytest

from attention import platform

# Programs are many objects that live long. With Python's own thresholds, looking
# through them again and again takes a tenth of the suite's time.
gc.freeze()
gc.set_threshold(100_000, 50, 100)


@pytest.fixture
def short_blocks(monkeypatch):
  """Blocks of 8 queries, so that short sequences run over several."""
  monkeypatch.setattr(platform, "window_rows", lambda width: 8)


@pytest.fixture
def tiny_tiles(monkeypatch):
  """Makes all tiles of a platform tiny, when it is called."""

  def shrink(rows):
    monkeypatch.setattr(platform, "LEAST_ROWS", rows)
    monkeypatch.setattr(platform, "DIAGONAL_ROWS", rows)

  return shrink
