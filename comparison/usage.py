"""What a run took of the machine: time, memory, and what others used meanwhile."""

import os
from pathlib import Path
import resource
import sys
import time

_STATISTICS = Path("/proc/stat")
_PEAK_UNIT = 1 if sys.platform == "darwin" else 1024

Usage = dict[str, float | None]
"""By the names of columns of results.csv: 'seconds', 'cpu_seconds', 'peak_bytes',
the largest resident size, and 'others_cores', which others kept busy."""


class Meter:
  """Counts from when it is made."""

  def __init__(self):
    self._start, self._own = time.monotonic(), time.process_time()
    self._busy = _busy_seconds()

  def others_cores(self, children_seconds: float = 0.0) -> float | None:
    """Cores that other programs kept busy on average; None off Linux.

    What a hypervisor gave to other machines counts too.

    Args:
      children_seconds: CPU time of processes of one's own, beside this one.
    """
    busy = _busy_seconds()
    if busy is None or self._busy is None:
      return None
    own = time.process_time() - self._own + children_seconds
    elapsed = max(time.monotonic() - self._start, 1e-3)
    return max(0.0, (busy - self._busy - own) / elapsed)

  def read(self, child: resource.struct_rusage | None = None) -> Usage:
    """What a child took, of which the system tells this, or else this process."""
    if child is None:
      spent, cpu_seconds = resource.getrusage(resource.RUSAGE_SELF), 0.0
      own = time.process_time() - self._own
    else:
      spent, cpu_seconds = child, child.ru_utime + child.ru_stime
      own = cpu_seconds
    return {
      "seconds": time.monotonic() - self._start,
      "cpu_seconds": own,
      "peak_bytes": spent.ru_maxrss * _PEAK_UNIT,
      "others_cores": self.others_cores(cpu_seconds),
    }


def _busy_seconds() -> float | None:
  """CPU time of all programs since the machine started, over all cores."""
  try:
    first, *_ = _STATISTICS.read_text().splitlines()
  except OSError:
    return None
  user, nice, system, _, _, irq, soft_irq, stolen, *_ = map(
    int, first.split()[1:]
  )
  ticks = user + nice + system + irq + soft_irq + stolen
  return ticks / os.sysconf("SC_CLK_TCK")
