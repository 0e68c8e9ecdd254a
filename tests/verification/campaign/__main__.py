"""Injects random faults and checks that the promises hold.

    python -m tests.verification.campaign --minutes=60 --seed=1
    python -m tests.verification.campaign --fault='disk full' --trial=7 --seed=1    # one trial

Faults get equal shares of the time. The seed, the fault and the number of a trial
determine it. At the end the campaign prints a table. The exit code is 1 if a promise
was broken.
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

from tests.verification.campaign.faults import FAULTS, Fault, NotSupported
import training  # noqa: F401 - adds the XLA flag of all programs


def main() -> None:
  """Parses the command line and runs the campaign."""
  # JAX reads the variable when it creates its first array.
  xla = os.environ.get("XLA_FLAGS", "")
  os.environ["XLA_FLAGS"] = f"{xla} --xla_force_host_platform_device_count=8"
  parser = argparse.ArgumentParser(prog="python -m tests.verification.campaign")
  parser.add_argument("--minutes", type=float, default=5.0)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--fault", default="", help="part of a fault's name")
  parser.add_argument("--trial", type=int, help="only this one")
  flags = parser.parse_args()
  chosen = [x for x in FAULTS if flags.fault in x.name]
  if not chosen:
    parser.error(
      f"--fault: expected part of a name in {[x.name for x in FAULTS]}"
    )
  print(f"seed {flags.seed}")
  if flags.trial is not None:
    sys.exit(any(not run_trial(x, flags.seed, flags.trial)[0] for x in chosen))
  sys.exit(not campaign(chosen, flags.minutes, flags.seed))


def run_trial(fault: Fault, seed: int, number: int) -> tuple[bool, str]:
  """Returns whether the promise held in a trial, and what was lost."""
  rng = np.random.default_rng([seed, zlib.crc32(fault.name.encode()), number])
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    try:
      return True, fault.trial(rng, pathlib.Path(folder))
    except NotSupported as reason:
      return True, f"not possible here: {reason}"
    except Exception:
      last_line = traceback.format_exc().strip().splitlines()[-1]
      print(f"\n{fault.name}, trial {number}: broken\n{traceback.format_exc()}")
      return False, last_line


def campaign(faults: list[Fault], minutes: float, seed: int) -> bool:
  """Runs trials, prints a table, and returns whether all promises held."""
  seconds = dict.fromkeys(faults, 0.0)
  outcomes = collections.defaultdict(collections.Counter)
  broken = collections.defaultdict(list)
  end = time.monotonic() + 60 * minutes
  while time.monotonic() < end:
    waiting = [x for x in faults if sum(outcomes[x].values()) < x.times]
    if not waiting:
      break
    fault = min(waiting, key=seconds.__getitem__)
    number = sum(outcomes[fault].values())
    start = time.monotonic()
    is_kept, lost = run_trial(fault, seed, number)
    seconds[fault] += time.monotonic() - start
    outcomes[fault][lost if is_kept else "broken"] += 1
    if not is_kept:
      broken[fault].append(number)
  print("\n| fault | promise | trials | promise kept | lost |")
  print("| --- | --- | --: | --: | --- |")
  for fault in faults:
    count = sum(outcomes[fault].values())
    lost = ", ".join(
      f"{text} ({n})" for text, n in outcomes[fault].most_common(4) if text
    )
    survived = count - len(broken[fault])
    print(
      f"| {fault.name} | {fault.promise} | {count} | {survived} | "
      f"{lost or 'nothing'} |"
    )
  return not any(broken.values())


if __name__ == "__main__":
  main()
