"""Stores prepared data of the tests in a separate folder."""

from tests.tasks.folders import (  # noqa: F401 - fixtures
  _cache,
  empty_cache,
  folder,
  path,
  shared_cache,
)
