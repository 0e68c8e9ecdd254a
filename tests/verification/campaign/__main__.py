"""Faults again and again, each with a promise that has to hold.

    python -m tests.verification.campaign --minutes=60 --seed=1
    python -m tests.verification.campaign --fault='disk full' --trial=7 --seed=1    # one again

Faults get equal shares of the time. A trial follows from the seed, its fault and its
number. At the end stands a table; the exit code is 1 where a promise was broken.
"""

import argparse
import collections
import os
import pathlib
import sys
import tempfile
import time
import traceback
import zlib

import numpy as np

from tests.verification.campaign.faults import FAULTS, Fault, NotHere
import training  # noqa: F401 - adds the flag that every program has


def main() -> None:
  """Parses the command line and runs the campaign."""
  # JAX reads it where its first array is made.
  xla = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{xla} --xla_force_host_platform_device_count=8"
  parser = argparse.ArgumentParser(prog="python -m tests.verification.campaign")
  parser.add_argument("--minutes", type=float, default=5.0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--fault", default="", help="a part of its name")
  parser.add_argument("--trial", type=int, help="this one alone")
  flags = parser.parse_args()
  chosen = [x for x in FAULTS if flags.fault in x.name]
  if not chosen:
    parser.error(f"--fault: expected a part of {[x.name for x in FAULTS]}")
  print(f"seed {flags.seed}")
  if flags.trial is not None:
    sys.exit(any(not tried(x, flags.seed, flags.trial)[0] for x in chosen))
  sys.exit(not campaign(chosen, flags.minutes, flags.seed))


def tried(fault: Fault, seed: int, number: int) -> tuple[bool, str]:
  """Whether the promise held in one trial, and what was lost."""
  rng = np.random.default_rng([seed, zlib.crc32(fault.name.encode()), number])
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    try:
      return True, fault.trial(rng, pathlib.Path(folder))
    except NotHere as reason:
      return True, f"not tried here: {reason}"
    except Exception:
      told = traceback.format_exc().strip().splitlines()[-1]
      print(f"\n{fault.name}, trial {number}: broken\n{traceback.format_exc()}")
      return False, told


def campaign(faults: list[Fault], minutes: float, seed: int) -> bool:
  """Whether all promises held, after a table of what was tried."""
  seconds = dict.fromkeys(faults, 0.0)
  held = collections.defaultdict(collections.Counter)
  broken = collections.defaultdict(list)
  end = time.monotonic() + 60 * minutes
  while time.monotonic() < end:
    waiting = [x for x in faults if sum(held[x].values()) < x.times]
    if not waiting:
      break
    fault = min(waiting, key=seconds.__getitem__)
    number = sum(held[fault].values())
    start = time.monotonic()
    is_kept, lost = tried(fault, seed, number)
    seconds[fault] += time.monotonic() - start
    held[fault][lost if is_kept else "broken"] += 1
    if not is_kept:
      broken[fault].append(number)
  print("\n| fault | promise | tried | survived | what was lost |")
  print("| --- | --- | --: | --: | --- |")
  for fault in faults:
    count = sum(held[fault].values())
    lost = ", ".join(
      f"{text} ({n})" for text, n in held[fault].most_common(4) if text
    )
    survived = count - len(broken[fault])
    print(
      f"| {fault.name} | {fault.promise} | {count} | {survived} | "
      f"{lost or 'nothing'} |"
    )
  return not any(broken.values())


if __name__ == "__main__":
  main()
