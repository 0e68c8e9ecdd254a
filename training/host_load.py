"""How much of the machine other programs used while something was measured."""

import os
from pathlib import Path
import time

_STATISTICS = Path("/proc/stat")


class Others:
  """Counts from when it is made."""

  def __init__(self):
    self._busy, self._start = _busy_seconds(), time.monotonic()
    self._own = time.process_time()

  def cores(self, children_seconds: float = 0.0) -> float | None:
    """Cores that others kept busy on average since then; None off Linux.

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
