"""Fixtures: prepared data of tests are stored once in a separate folder."""

from tests.tasks.folders import (  # noqa: F401 - fixtures
  _cache,
  empty_cache,
  shared_cache,
  text,
)
