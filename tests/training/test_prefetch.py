"""Batches come in order, ahead of time, and faults come with them."""

import threading

import pytest

from training.prefetch import prefetch


def test_order():
  assert list(prefetch(lambda i: i * i, 3, 9)) == [9, 16, 25, 36, 49, 64]
  assert list(prefetch(lambda i: i, 5, 5)) == []


def test_the_next_one_is_made_while_this_one_is_used():
  made = threading.Event()

  def make(index):
    if index == 1:
      made.set()
    return index

  batches = prefetch(make, 0, 3)
  assert next(batches) == 0
  assert made.wait(timeout=10)
  batches.close()


def test_an_exception_comes_in_its_turn():
  def make(index):
    if index == 2:
      raise OSError("disk")
    return index

  batches = prefetch(make, 0, 5)
  assert [next(batches), next(batches)] == [0, 1]
  with pytest.raises(OSError, match="disk"):
    next(batches)
