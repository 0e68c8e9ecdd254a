"""Times programs in turn within a time budget and reports omitted ones."""

from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
import math
import os
import time
from typing import Any

import jax
import numpy as np

from benchmarks.programs import Program, first_line

Row = dict[str, Any]
"""The measurements of one program.

The keys are 'mechanism', 'causal', 'part', 'length', 'seconds' (the median, None if
not run), 'spread' (half the interquartile range, None for fewer than two calls),
'temp_bytes' (None if not compiled), 'compile_seconds', and 'reason' if not run.
"""

_ROUNDS = 10
_MIN_ROUNDS = 3
_ONCE_BELOW = 1.0
"""Seconds of a call; shorter calls run once with any budget."""
_MIN_ROUNDS_BELOW = 0.1
"""Seconds of a call; shorter calls run `_MIN_ROUNDS` times with any budget."""
_BATCH_SECONDS = 0.02
"""Seconds of calls that an accelerator runs per time measurement.

A single call may take less time than Python needs to dispatch it.
"""


class Budget:
  """Divides time among lengths in proportion to them, apart from compilation.

  Time that a length does not use goes to the longer ones. Compilation takes about as
  long at every length, so the last length predicts the next ones.
  """

  def __init__(
    self,
    seconds: float,
    lengths: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._clock = clock
    self._end = clock() + seconds
    self._lengths = sorted(lengths)
    self._compile_seconds = 0.0

  def share(self) -> float:
    """Returns the seconds for calls of the shortest remaining length."""
    compilation = self._compile_seconds * len(self._lengths)
    seconds = self._end - self._clock() - compilation
    return max(seconds, 0.0) * self._lengths[0] / sum(self._lengths)

  def compiled(self, seconds: float) -> None:
    """Records the compilation time of the shortest remaining length."""
    self._compile_seconds = seconds
    # This time is spent, so `share` must not reserve it again.
    self._end += seconds

  def next(self) -> None:
    """Marks the shortest remaining length as done."""
    self._end -= self._compile_seconds
    self._lengths.pop(0)


def time_length(
  programs: Iterable[Program],
  budget: Budget,
  max_bytes: float,
  previous_rows: Sequence[Row] = (),
) -> list[Row]:
  """Times all programs of one length.

  It compiles all programs first, calls each once to warm up, and then calls them in
  up to ten rounds, fastest first, until the share of this length is spent. A program
  runs at least three times if three calls fit into an equal part of the share, or
  take less than 0.1 s each. A program without time for another call keeps the time
  of the warm-up call, without a spread.

  Args:
    programs: the programs of one length.
    budget: the time budget; it advances to the next length.
    max_bytes: programs that need more memory are not run.
    previous_rows: rows of shorter lengths, from which the time of a call is
      extrapolated quadratically. If one call of each program exceeds the share, the
      slowest programs are left out, except those below one second.

  Returns:
    One row per program, in order.
  """
  start = time.perf_counter()
  rows, ready = [], []
  for program, error in _compile(programs):
    row = _row(program)
    rows.append(row)
    if error is not None:
      row["reason"] = f"not run: {first_line(error)}"
      continue
    row["temp_bytes"] = program.temp_bytes
    if program.needed_bytes > max_bytes:
      row["reason"] = (
        f"not run: needs {program.needed_bytes / 2**30:.3g} GiB; --max_gib "
        f"allows {max_bytes / 2**30:g}"
      )
    else:
      ready.append((program, row))
  budget.compiled(time.perf_counter() - start)
  share = budget.share()
  _leave_out([row for _, row in ready], share, previous_rows)
  deadline = time.perf_counter() + share
  warm = _warm_up(x for x in ready if "reason" not in x[1])
  guaranteed = max(share / max(len(warm), 1) / _MIN_ROUNDS, _MIN_ROUNDS_BELOW)
  timings = _time_in_turn(warm, deadline, guaranteed)
  for (_, row, _), times in zip(warm, timings, strict=True):
    low, median, high = np.percentile(times, [25, 50, 75])
    row["seconds"] = float(median)
    row["spread"] = float(high - low) / 2 if len(times) > 1 else None
  budget.next()
  return rows


def _compile(
  programs: Iterable[Program],
) -> list[tuple[Program, Exception | None]]:
  """Compiles programs; returns each with its error, if any.

  Compilation for accelerators takes longer, so it runs in parallel. For a CPU it runs
  one program at a time, so that the measured seconds are its own.
  """

  def compile_one(program):
    try:
      program.compile()
    except Exception as error:  # An error fills one row of the table.
      return program, error
    return program, None

  workers = 1 if jax.default_backend() == "cpu" else os.cpu_count()
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    return list(pool.map(compile_one, programs))


def _warm_up(
  ready: Iterable[tuple[Program, Row]],
) -> list[tuple[Program, Row, float]]:
  """Calls each program once; returns those that succeed, with their seconds."""
  warm = []
  for program, row in ready:
    try:
      seconds = program.seconds()
      if jax.default_backend() != "cpu":
        # The first call of a program loads it.
        seconds = program.seconds()
        program.repeats = math.ceil(_BATCH_SECONDS / seconds)
    except jax.errors.JaxRuntimeError as error:
      row["reason"] = f"not run: {first_line(error)}"
    else:
      warm.append((program, row, seconds))
  return warm


def _time_in_turn(
  warm: Sequence[tuple[Program, Row, float]], deadline: float, guaranteed: float
) -> list[list[float]]:
  """Returns the seconds of each program's calls.

  Programs that take at most `guaranteed` seconds run at least `_MIN_ROUNDS` times.
  """
  timings: list[list[float]] = [[] for _ in warm]
  for calls in range(_ROUNDS):
    for i in np.argsort([first for *_, first in warm]):
      program, _, first = warm[i]
      needed = first * program.repeats
      fits = time.perf_counter() + needed <= deadline
      if fits or (calls < _MIN_ROUNDS and needed <= guaranteed):
        timings[i].append(program.seconds())
  return [
    times or [first] for times, (*_, first) in zip(timings, warm, strict=True)
  ]


def _row(program: Program) -> Row:
  return {
    "mechanism": program.mechanism,
    "causal": program.causal,
    "part": program.part,
    "length": program.length,
    "seconds": None,
    "spread": None,
    "temp_bytes": None,
    "compile_seconds": program.compile_seconds,
  }


def _leave_out(
  rows: Sequence[Row], share: float, previous_rows: Sequence[Row]
) -> None:
  """Omits the slowest programs until one call of every other program fits."""
  total = 0.0
  for seconds, i in sorted(
    (_extrapolate(row, previous_rows), i) for i, row in enumerate(rows)
  ):
    total += seconds
    if seconds > _ONCE_BELOW and total > share:
      rows[i]["reason"] = (
        f"not run: a call would take up to {seconds:.0f} s, more than "
        "--minutes leaves"
      )


def _extrapolate(row: Row, previous_rows: Sequence[Row]) -> float:
  """Extrapolates the time of a call quadratically from the longest length."""
  measurements = [
    (other["length"], other["seconds"])
    for other in previous_rows
    if other["seconds"] is not None
    and all(other[key] == row[key] for key in ("mechanism", "causal", "part"))
  ]
  length, seconds = max(measurements, default=(1, 0.0))
  return seconds * (row["length"] / length) ** 2
