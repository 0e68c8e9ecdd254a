"""Prepares the next batches in a thread while the device computes."""

from collections.abc import Callable, Generator
import concurrent.futures
from typing import TypeVar

T = TypeVar("T")

_DEPTH = 2


def prefetch(
  make: Callable[[int], T], first: int, last: int, depth: int = _DEPTH
) -> Generator[T, None, None]:
  """Yields `make(first), …, make(last - 1)`, computed ahead in one thread.

  At most `depth` results are computed ahead.

  Yields:
    The results.

  Raises:
    Exception: the exception that `make` raised, in place of its result.
  """
  executor = concurrent.futures.ThreadPoolExecutor(
    1, thread_name_prefix="prefetch"
  )
  try:
    ahead = [
      executor.submit(make, i) for i in range(first, min(first + depth, last))
    ]
    for i in range(first, last):
      result = ahead.pop(0).result()
      if i + depth < last:
        ahead.append(executor.submit(make, i + depth))
      yield result
  finally:
    executor.shutdown(wait=False, cancel_futures=True)
