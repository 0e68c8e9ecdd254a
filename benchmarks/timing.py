"""Times programs in turn, within a time budget, and reports what it omits."""

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
"""One program: 'mechanism', 'causal', 'part', 'length', and 'seconds' (median,
None if not run), 'spread' (half the interquartile range, None of less than two
calls), 'temp_bytes' (None if not compiled), 'compile_seconds'; 'reason' only if not
run.
"""

_ROUNDS = 10
_FEWEST = 3
_SHORT = 1.0
"""Seconds of a call: shorter ones are made once, with any budget."""
_VERY_SHORT = 0.1
"""Likewise, three times."""
_QUEUED = 0.02
"""Seconds of calls that an accelerator makes between two readings of the clock: one
call may take less than Python needs to ask for it."""


class Budget:
  """Divides the time over lengths in proportion to them; compilation is separate.

  What a length leaves goes to the ones after it. Compiling takes about as long
  at every length, so the last one tells what the next ones need.
  """

  def __init__(
    self,
    seconds: float,
    lengths: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
  ):
    self._clock = clock
    self._end = clock() + seconds
    self._left = sorted(lengths)
    self._compiling = 0.0

  def share(self) -> float:
    """Seconds for the calls of the shortest remaining length."""
    compiling = self._compiling * len(self._left)
    rest = self._end - self._clock() - compiling
    return max(rest, 0.0) * self._left[0] / sum(self._left)

  def compiled(self, seconds: float) -> None:
    """Records the compilation time of the shortest remaining length."""
    self._compiling = seconds
    # It is spent: `share` must not set it aside again.
    self._end += seconds

  def next(self) -> None:
    """Marks the shortest remaining length as done."""
    self._end -= self._compiling
    self._left.pop(0)


def time_length(
  programs: Iterable[Program],
  budget: Budget,
  max_bytes: float,
  before: Sequence[Row] = (),
) -> list[Row]:
  """Rows of all programs of one length.

  Everything is compiled first. What may run is called once to warm up, then in
  rounds, the fastest program first: at most ten, until the share of this length
  is spent. Three calls are certain where they fit into an equal part of it, or
  take less than 0.1 s each. A program without time for another call keeps the
  first, with no spread.

  Args:
    programs: of one length.
    budget: told of this length.
    max_bytes: programs that need more are not run.
    before: rows of shorter lengths. They tell how long a call would take, were
      it quadratic from the longest one on. Where one call of each is more than
      the share the slowest are left out, none below a second.

  Returns:
    One row a program, in order.
  """
  start = time.perf_counter()
  rows, ready = [], []
  for program, fault in _compiled(programs):
    row = _row(program)
    rows.append(row)
    if fault is not None:
      row["reason"] = f"not run: {first_line(fault)}"
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
  _leave_out([row for _, row in ready], share, before)
  deadline = time.perf_counter() + share
  warm = _warm_up(x for x in ready if "reason" not in x[1])
  certain = max(share / max(len(warm), 1) / _FEWEST, _VERY_SHORT)
  timings = _in_turn(warm, deadline, certain)
  for (_, row, _), times in zip(warm, timings, strict=True):
    low, median, high = np.percentile(times, [25, 50, 75])
    row["seconds"] = float(median)
    row["spread"] = float(high - low) / 2 if len(times) > 1 else None
  budget.next()
  return rows


def _compiled(
  programs: Iterable[Program],
) -> list[tuple[Program, Exception | None]]:
  """Each program, compiled, or the error of the device.

  An accelerator's are compiled side by side, for its compiler takes longer; a CPU's
  one by one, and their seconds are those of compiling alone.
  """

  def compiled(program):
    try:
      program.compile()
    except Exception as error:  # A row of the table, not its end.
      return program, error
    return program, None

  workers = 1 if jax.default_backend() == "cpu" else os.cpu_count()
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    return list(pool.map(compiled, programs))


def _warm_up(
  ready: Iterable[tuple[Program, Row]],
) -> list[tuple[Program, Row, float]]:
  """Each program after one call, with its seconds; omits programs that fail."""
  warm = []
  for program, row in ready:
    try:
      seconds = program.seconds()
      if jax.default_backend() != "cpu":
        # The first call of a program loads it.
        seconds = program.seconds()
        program.repeats = math.ceil(_QUEUED / seconds)
    except jax.errors.JaxRuntimeError as error:
      row["reason"] = f"not run: {first_line(error)}"
    else:
      warm.append((program, row, seconds))
  return warm


def _in_turn(
  warm: Sequence[tuple[Program, Row, float]], deadline: float, certain: float
) -> list[list[float]]:
  """Seconds of each program's calls; at least `_FEWEST` calls of `certain` seconds."""
  timings: list[list[float]] = [[] for _ in warm]
  for calls in range(_ROUNDS):
    for i in np.argsort([first for *_, first in warm]):
      program, _, first = warm[i]
      needed = first * program.repeats
      fits = time.perf_counter() + needed <= deadline
      if fits or (calls < _FEWEST and needed <= certain):
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
  rows: Sequence[Row], share: float, before: Sequence[Row]
) -> None:
  """Omits the slowest programs until one call of each other one fits."""
  total = 0.0
  for seconds, i in sorted(
    (_extrapolate(row, before), i) for i, row in enumerate(rows)
  ):
    total += seconds
    if seconds > _SHORT and total > share:
      rows[i]["reason"] = (
        f"not run: a call would take up to {seconds:.0f} s, more than "
        "--minutes leaves"
      )


def _extrapolate(row: Row, before: Sequence[Row]) -> float:
  """Seconds of a call, extrapolated quadratically from the longest measured length."""
  measurements = [
    (other["length"], other["seconds"])
    for other in before
    if other["seconds"] is not None
    and all(other[key] == row[key] for key in ("mechanism", "causal", "part"))
  ]
  length, seconds = max(measurements, default=(1, 0.0))
  return seconds * (row["length"] / length) ** 2
