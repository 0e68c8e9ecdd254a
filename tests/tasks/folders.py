"""Fixtures of texts, and a separate cache for prepared data."""

import numpy as np
import pytest

from settings import cache
from tests.tasks.text_cases import TEXT


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
  return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, shared_cache):
  monkeypatch.setenv(cache.VARIABLE, str(shared_cache))


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
  monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
  return cache.folder("datasets")


@pytest.fixture
def path(tmp_path):
  """Writes a small text."""
  file = tmp_path / "text.txt"
  file.write_text(TEXT, encoding="utf-8")
  return file


@pytest.fixture(scope="session")
def text(tmp_path_factory):
  """Writes the same text for all tests, which must not change it."""
  file = tmp_path_factory.mktemp("texts") / "text.txt"
  file.write_text(TEXT, encoding="utf-8")
  return file


@pytest.fixture
def folder(tmp_path):
  """Writes sentences of 1 to 40 words, some longer than a limit of 24."""
  folder = tmp_path / "data"
  folder.mkdir()
  rng = np.random.default_rng(0)
  for split, count in (("train", 200), ("val", 20), ("test_a", 9)):
    lengths = rng.integers(1, 41, count)
    rows = [rng.integers(0, 30, n) for n in lengths]
    for language in "en", "de":
      text = "".join(
        " ".join(f"{language}{i}" for i in row) + "\n" for row in rows
      )
      (folder / f"{split}.{language}").write_text(text)
  return folder
