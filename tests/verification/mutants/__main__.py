"""Plants faults, one at a time, and runs the tests of that part: each must fail.

    python -m tests.verification.mutants                  # all of them
    python -m tests.verification.mutants --only=delta     # whose file or name has this text
    python -m tests.verification.mutants --workers=2

So a suite that has become shorter is known to say the same. Each worker has a copy
of the working tree. At the end, the tests that have found a fault run without one,
where they must pass. The exit code is 1 where a fault survives.
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
"""Seconds for the tests of a fault."""


class Verdict(NamedTuple):
  """What the tests found.

  Attributes:
    is_caught: whether a test failed or never came back.
    seconds: how long they took.
    told: the test, or why there is none.
    test: the one that failed.
  """

  is_caught: bool
  seconds: float
  told: str
  test: str = ""


def main() -> None:
  """Parses the command line and tries the faults."""
  parser = argparse.ArgumentParser(prog="python -m tests.verification.mutants")
  parser.add_argument("--only", default="", help="a part of a file or name")
  parser.add_argument("--workers", type=int, default=1)
  flags = parser.parse_args()
  if flags.workers < 1:
    parser.error(f"--workers: expected at least 1, got {flags.workers}")
  if moved := [f"{x.file}: {x.name}" for x in MUTANTS if not fits(x)]:
    sys.exit(f"expected the old text once, and tests, of: {'; '.join(moved)}")
  chosen = [x for x in MUTANTS if flags.only in x.file or flags.only in x.name]
  if not chosen:
    parser.error(f"--only: expected a part of a file or name, got {flags.only}")
  sys.exit(not are_caught(chosen, flags.workers))


def fits(mutant: Mutant) -> bool:
  """Whether the text that a fault replaces is there, once, and its tests are."""
  path = ROOT / mutant.file
  paths = [x for x in selection(mutant.tests) if not x.startswith("-")]
  is_there = path.is_file() and path.read_text().count(mutant.old) == 1
  return is_there and all((ROOT / x).exists() for x in paths)


def are_caught(mutants: Sequence[Mutant], workers: int) -> bool:
  """Whether the tests find all of them; one line is printed for each."""
  trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()

  def one(mutant: Mutant) -> Verdict:
    tree = trees.get()
    try:
      verdict = tried(tree, mutant)
    finally:
      trees.put(tree)
    word = "caught  " if verdict.is_caught else "SURVIVED"
    place = f"{mutant.file}: {mutant.name} · {verdict.told}"
    print(f"{word} {verdict.seconds:6.1f} s  {place}", flush=True)
    return verdict

  with contextlib.ExitStack() as stack:
    for _ in range(workers):
      folder = stack.enter_context(tempfile.TemporaryDirectory())
      trees.put(copy(pathlib.Path(folder)))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
      verdicts = list(pool.map(one, mutants))
    tests = sorted({x.test for x in verdicts if x.test})
    code, output = 0, ""
    if tests:  # Of none, pytest would run all.
      code, output = run(trees.get(), tests, _LIMIT + 30.0 * len(tests))
  false = FAILED.findall(output)
  if code != 0 and not false:  # They did not run.
    false = tests
  for test in false:
    print(f"fails without a fault: {test}")
  caught = sum(x.is_caught and x.test not in false for x in verdicts)
  print(f"{caught} of {len(mutants)} faults are caught")
  return caught == len(mutants)


def selection(tests: str | Sequence[str]) -> list[str]:
  """What pytest is given for the tests of a fault."""
  if not isinstance(tests, str):
    return [*tests]
  return [tests] if "/" in tests else [f"--of={tests}", "tests/attention"]


def tried(tree: pathlib.Path, mutant: Mutant) -> Verdict:
  """What the tests say of a fault that is planted in a tree, and taken out again."""
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
