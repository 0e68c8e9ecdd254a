"""Prepared data of the tests go to a folder of their own, made once."""

import pytest


@pytest.fixture(scope="session")
def shared_cache(tmp_path_factory):
  return tmp_path_factory.mktemp("datasets")


@pytest.fixture(autouse=True)
def _cache(monkeypatch, shared_cache):
  monkeypatch.setenv("ATTENTION_DATA_DIR", str(shared_cache))


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
  folder = tmp_path / "cache"
  monkeypatch.setenv("ATTENTION_DATA_DIR", str(folder))
  return folder
