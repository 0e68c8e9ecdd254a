"""What a config asks for, against the memory of this machine.

One rule for all sizes: what would take more bytes than there are is refused
before any of it is made. Estimates are from below, so that nothing is refused
that would have fitted; what passes may still turn out too large.
"""

import os
import sys

_GB = 10**9
_MOST_SHOWN = 10**12


def machine_bytes() -> int:
  """Physical memory; without a limit where the system does not tell."""
  try:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  except (AttributeError, OSError, ValueError):  # Windows has no sysconf.
    return sys.maxsize


def device_bytes() -> int:
  """Memory of all accelerators; 0 where they do not tell, as a CPU does not."""
  # Asked only for what the host cannot hold; it starts the devices.
  import jax

  stats = (device.memory_stats() or {} for device in jax.local_devices())
  return sum(one.get("bytes_limit", 0) for one in stats)


def check_fits(
  name: str, what: str, num_bytes: int, *, on_devices: bool = False
) -> None:
  """Raises ValueError where something takes more memory than there is.

  Args:
    name: of the leaf that decides its size.
    what: a plural, for the message; names every other leaf that counts.
    num_bytes: that it takes at least.
    on_devices: it may lie on accelerators instead of in the machine's memory.

  Raises:
    ValueError: it does not fit; the message starts with `name`.
  """
  available = machine_bytes()
  if num_bytes > available and on_devices:
    available = max(available, device_bytes())
  if num_bytes > available:
    raise ValueError(
      f"{name}: {what} take at least {_gigabytes(num_bytes)}, more than the "
      f"{_gigabytes(available)} of memory here"
    )


def _gigabytes(num_bytes: int) -> str:
  whole = -(-num_bytes // _GB)
  return f"{whole:,} GB" if whole < _MOST_SHOWN else f"{_MOST_SHOWN:.0e} GB"
