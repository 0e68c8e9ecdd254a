"""The resources of the machine that a run and other programs use."""

import functools
import os
from pathlib import Path
import platform
import subprocess
import sys
import time
from typing import Any

import jax
import psutil

BUSY_CORES = 0.25
"""A measurement is undisturbed if other programs use at most this many cores."""

_BUSY = ("user", "nice", "system", "irq", "softirq", "steal")
_CPU = Path("/proc/cpuinfo")
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024

Usage = dict[str, float]
"""Columns of results.csv: 'seconds', 'cpu_seconds', 'peak_bytes', the largest resident
size, and 'others_cores', the number of cores that other programs used."""


class Meter:
  """Counts the resources that this process uses from now on."""

  def __init__(self):
    self._start, self._own = time.monotonic(), time.process_time()
    self._busy = _busy_seconds()

  def others_cores(self) -> float:
    """The average number of cores that other programs used.

    This includes time that a hypervisor gave to other machines.
    """
    others = _busy_seconds() - self._busy - (time.process_time() - self._own)
    return max(0.0, others / max(time.monotonic() - self._start, 1e-3))

  def read_child(self, used: Any) -> Usage:
    """The resources of a process that started with this meter and has ended.

    Args:
      used: its resource usage, from `os.wait4`.
    """
    seconds = max(time.monotonic() - self._start, 1e-3)
    cpu_seconds = used.ru_utime + used.ru_stime
    return {
      "seconds": seconds,
      "cpu_seconds": cpu_seconds,
      "peak_bytes": used.ru_maxrss * _PEAK_UNIT,
      "others_cores": max(0.0, self.others_cores() - cpu_seconds / seconds),
    }


@functools.cache
def machine() -> dict[str, str | int | None]:
  """The 'commit', 'cpu', 'cores' and 'jax' version of this process.

  The commit is that of the checkout of this file, or None without a checkout. Cores are
  those that this process may use; their number changes the order of some sums, and so
  the rounding of results.
  """
  return {
    "commit": _commit(),
    "cpu": _cpu(),
    "cores": _cores(),
    "jax": jax.__version__,
  }


def _commit() -> str | None:
  command = ["git", "rev-parse", "HEAD"]
  folder = Path(__file__).parent
  try:
    process = subprocess.run(
      command, cwd=folder, capture_output=True, text=True, check=False
    )
  except OSError:  # No git.
    return None
  return process.stdout.strip() or None


def _cores() -> int | None:
  if hasattr(os, "sched_getaffinity"):  # Not on macOS.
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _cpu() -> str:
  try:
    lines = _CPU.read_text("utf-8").splitlines()
  except OSError:
    lines = []
  models = (x.partition(":")[2].strip() for x in lines if "model name" in x)
  return next(models, platform.processor() or platform.machine())


def _busy_seconds() -> float:
  """The CPU time of all programs since the machine started, over all cores."""
  times = psutil.cpu_times()._asdict()
  return sum(times.get(name, 0.0) for name in _BUSY)
