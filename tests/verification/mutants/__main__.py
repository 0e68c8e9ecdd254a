"""Plants faults one at a time and checks that the tests of that code fail.

    python -m tests.verification.mutants                  # all of them
    python -m tests.verification.mutants --only=delta     # a part of a file or name
    python -m tests.verification.mutants --workers=2

It shows that a shorter test suite still catches the same faults. Each worker has a
copy of the working tree. At the end, the tests that caught faults run once more
without any, and must pass. The exit code is 1 if a fault survives.
"""

import argparse
from collections.abc import Sequence
import concurrent.futures
import contextlib
import pathlib
import queue
import sys
import tempfile
import time
from typing import NamedTuple

from tests.verification.mutants import attention, mechanisms, models, training
from tests.verification.mutants.mutant import ROOT, Mutant
from tests.verification.mutants.trial import FAILED, copy, run

MUTANTS = (
  *attention.MUTANTS,
  *mechanisms.MUTANTS,
  *models.MUTANTS,
  *training.MUTANTS,
)

_LIMIT = 300.0
"""The time limit in seconds of the tests of one fault."""


class Verdict(NamedTuple):
  """The result of the tests of a fault.

  Attributes:
    is_caught: whether a test failed or hung.
    seconds: the time that the tests took.
    reason: the failed test, or why no test is named.
    test: the failed test, if any.
  """

  is_caught: bool
  seconds: float
  reason: str
  test: str = ""


def main() -> None:
  """Parses the command line and tries the faults."""
  parser = argparse.ArgumentParser(prog="python -m tests.verification.mutants")
  parser.add_argument("--only", default="", help="a part of a file or name")
  parser.add_argument("--workers", type=int, default=1)
  flags = parser.parse_args()
  if flags.workers < 1:
    parser.error(f"--workers: expected at least 1, got {flags.workers}")
  if outdated := [f"{x.file}: {x.name}" for x in MUTANTS if not fits(x)]:
    sys.exit(
      f"expected the old text once, and tests, of: {'; '.join(outdated)}"
    )
  chosen = [x for x in MUTANTS if flags.only in x.file or flags.only in x.name]
  if not chosen:
    parser.error(f"--only: expected a part of a file or name, got {flags.only}")
  sys.exit(not are_caught(chosen, flags.workers))


def fits(mutant: Mutant) -> bool:
  """Returns whether a fault's old text occurs once and its tests exist."""
  path = ROOT / mutant.file
  paths = [x for x in selection(mutant.tests) if not x.startswith("-")]
  is_unique = path.is_file() and path.read_text().count(mutant.old) == 1
  return is_unique and all((ROOT / x).exists() for x in paths)


def are_caught(mutants: Sequence[Mutant], workers: int) -> bool:
  """Tries faults, prints a line for each, and returns whether all are caught."""
  trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()

  def try_fault(mutant: Mutant) -> Verdict:
    tree = trees.get()
    try:
      verdict = run_tests(tree, mutant)
    finally:
      trees.put(tree)
    word = "caught  " if verdict.is_caught else "SURVIVED"
    place = f"{mutant.file}: {mutant.name} · {verdict.reason}"
    print(f"{word} {verdict.seconds:6.1f} s  {place}", flush=True)
    return verdict

  with contextlib.ExitStack() as stack:
    for _ in range(workers):
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      trees.put(copy(pathlib.Path(folder)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      verdicts = list(pool.map(try_fault, mutants))
    tests = sorted({x.test for x in verdicts if x.test})
    code, output = 0, ""
    if tests:  # Without names, pytest would run all tests.
      code, output = run(trees.get(), tests, _LIMIT + 30.0 * len(tests))
  false_alarms = FAILED.findall(output)
  if code != 0 and not false_alarms:  # The tests did not run.
    false_alarms = tests
  for test in false_alarms:
    print(f"fails without a fault: {test}")
  caught = sum(x.is_caught and x.test not in false_alarms for x in verdicts)
  print(f"{caught} of {len(mutants)} faults are caught")
  return caught == len(mutants)


def selection(tests: str | Sequence[str]) -> list[str]:
  """Returns the arguments of pytest for the tests of a fault."""
  if not isinstance(tests, str):
    return [*tests]
  return [tests] if "/" in tests else [f"--of={tests}", "tests/attention"]


def run_tests(tree: pathlib.Path, mutant: Mutant) -> Verdict:
  """Plants a fault in a tree, runs its tests, and restores the file."""
  path = tree / mutant.file
  text = path.read_text()
  path.write_text(text.replace(mutant.old, mutant.new))
  start = time.monotonic()
  try:
    code, output = run(tree, ["-x", *selection(mutant.tests)], _LIMIT)
  finally:
    path.write_text(text)
  seconds = time.monotonic() - start
  if code is None:
    return Verdict(output == "hung", seconds, f"{output} after {_LIMIT:.0f} s")
  if failed := FAILED.search(output):
    return Verdict(True, seconds, failed[1], failed[1])
  last = output.strip().splitlines()[-1:] if code else ["all tests pass"]
  return Verdict(False, seconds, f"exit code {code}: {''.join(last)}")


if __name__ == "__main__":
  main()
