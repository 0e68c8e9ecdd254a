"""Prepared data of the tests go to a folder of their own, made once."""

from tests.tasks.folders import (  # noqa: F401 - fixtures
  _cache,
  empty_cache,
  shared_cache,
  text,
)
