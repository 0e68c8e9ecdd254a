"""Plants random faults, one at a time, and measures how many the suite catches.

    python -m pip install cosmic-ray pytest-cov   # In a separate environment: see below.
    COVERAGE_FILE=lines python -m pytest -m "not thorough" --cov --cov-context=test tests/tasks
    python -m tests.verification.mutants.random_faults --faults=300 --seed=1 --record=faults.jsonl --lines=lines

The second command is optional. For one folder of tests, it records which tests run
which line; `coverage combine` merges the files of several folders. A fault then needs
only the tests of its line. Without a record of its line, the tests of its folder run.

The test suite does not need cosmic-ray: use a second environment that imports the
packages of `.venv` through a `.pth` file. A fault is a random mutation of a random
line: of an operator, a comparison, a number or a condition, two swapped arguments, or
a dropped keyword argument. Each line of the record is a fault and its result. The same
command resumes an interrupted record. Survivors that change nothing are listed in
`equivalent.json` with the reason.
"""

import argparse
import ast
from collections.abc import Iterator
import difflib
import functools
import json
import pathlib
import random
import re
import sys
import tempfile
import time
from typing import NamedTuple

import coverage

from tests.verification.mutants.mutant import JUDGES, ROOT
from tests.verification.mutants.operators import mutate, mutations
from tests.verification.mutants.trial import FAILED, copy, run

FOLDERS = ("attention", "models", "training", "tasks", "comparison", "projects")
_SKIPPED = re.compile(r"attention/(definitions|testing)/|/(tests|configs)/")
_JUDGES_ELSEWHERE = {
  "attention": ["tests/verification/peers"],
  # Tests of published weights, and of the defaults of every config.
  "projects": ["tests/models/published", "tests/training/test_config_help.py"],
  "comparison": ["tests/test_compare.py"],
}
"""Package -> tests outside its folder that judge it."""

_EQUIVALENT = pathlib.Path(__file__).parent / "equivalent.json"


class Fault(NamedTuple):
  """One mutation of one line.

  Attributes:
    file: the path from the root of the tree.
    line: the number of the line, from 1.
    operator: the mutation operator.
    occurrence: the number of the operator's occurrence in the file.
  """

  file: str
  line: int
  operator: str
  occurrence: int


def main() -> None:
  """Parses the command line and tries the faults."""
  parser = argparse.ArgumentParser(
    prog="python -m tests.verification.mutants.random_faults"
  )
  parser.add_argument("--faults", type=int, default=300)
  parser.add_argument("--seed", type=int, default=1)
  parser.add_argument(
    "--limit", type=float, default=1200.0, help="seconds per fault"
  )
  parser.add_argument("--record", type=pathlib.Path, required=True)
  parser.add_argument(
    "--lines", type=pathlib.Path, help="data file of coverage"
  )
  flags = parser.parse_args()
  flags.record.touch()
  results = [json.loads(x) for x in flags.record.read_text().splitlines()]
  done = {tuple(result["fault"]) for result in results}
  with tempfile.TemporaryDirectory() as folder:
    tree = copy(pathlib.Path(folder))
    for _, fault in zip(range(flags.faults), sample(flags.seed), strict=False):
      if fault in done:
        continue
      results.append(run_tests(tree, fault, flags.limit, flags.lines))
      with flags.record.open("a") as record:
        record.write(json.dumps(results[-1]) + "\n")
      print(results[-1]["result"], results[-1]["diff"], sep="\n", flush=True)
  print(summary(results))


def sample(seed: int) -> Iterator[Fault]:
  """Yields one random mutation per line, in a random order of lines."""
  lines = [
    (str(path.relative_to(ROOT)), number)
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not _SKIPPED.search(str(path.relative_to(ROOT)))
    for number in range(1, len(path.read_text().splitlines()) + 1)
  ]
  generator = random.Random(seed)
  generator.shuffle(lines)
  for file, line in lines:
    candidates = [x for x in _mutations(file) if x[0] == line]
    generator.shuffle(candidates)
    source = (ROOT / file).read_text()
    for _, operator, occurrence in candidates:
      if mutate(source, operator, occurrence) != source:
        yield Fault(file, line, operator, occurrence)
        break


@functools.cache
def _mutations(file: str) -> list[tuple[int, str, int]]:
  """Returns line, operator and occurrence of every mutation."""
  source = (ROOT / file).read_text()
  ignored = _ignored(source)
  return [
    (start[0], operator, occurrence)
    for operator, occurrence, start in mutations(source)
    if not any(first <= start < last for first, last in ignored)
  ]


def _ignored(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
  """Returns the spans that tests need not judge.

  They are annotations, decorators, docstrings, imports, error messages, logging, and
  the sizes that configs and benchmarks use.
  """
  lines = source.splitlines()

  def position(line: int, offset: int) -> tuple[int, int]:
    return line, len(lines[line - 1].encode()[:offset].decode())

  nodes = []
  for node in ast.walk(ast.parse(source)):
    match node:
      case ast.FunctionDef(returns=returns, decorator_list=decorators):
        nodes += [returns, *decorators]
      case ast.ClassDef(decorator_list=decorators):
        nodes += decorators
      case ast.arg(annotation=x) | ast.AnnAssign(annotation=x):
        nodes.append(x)
      case ast.keyword(arg="help" | "description") | ast.Raise():
        nodes.append(node)
      case ast.keyword(value=ast.Call(func=ast.Name(id="Hyperparameters"))):
        nodes.append(node)
      case ast.Call(func=function) if re.search(
        r"Error$|Warning$|^warnings\.|^log(ging|ger)?\.", ast.unparse(function)
      ):
        nodes.append(node)
      case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
        nodes.append(node)
  return [
    (position(x.lineno, x.col_offset), position(x.end_lineno, x.end_col_offset))
    for x in nodes
    if x is not None
  ]


def run_tests(
  tree: pathlib.Path, fault: Fault, limit: float, lines: pathlib.Path | None
) -> dict:
  """Plants a fault in a tree, runs its tests, and restores the file."""
  path = tree / fault.file
  source = path.read_text()
  text = mutate(source, fault.operator, fault.occurrence)
  delta = difflib.ndiff(source.splitlines(), text.splitlines())
  diff = [line for line in delta if line.startswith(("- ", "+ "))]
  start, result, test = time.monotonic(), "survived", ""
  try:
    path.write_text(text)
    covering = lines and covering_tests(lines, fault, source)
    for tests in [covering] if covering else likely_tests(tree, fault, source):
      code, output = run(tree, ["-x", "-n0", *tests], limit)
      if failed := FAILED.search(output):
        result, test = "caught", failed[1]
      elif code is None:
        result = "caught" if output == "hung" else "unfinished"
      # 5: no test is selected, since all are `thorough`.
      elif code not in (0, 5):
        result, test = "caught", "no test can be collected"
      if result != "survived":
        break
  finally:
    path.write_text(source)
  return {
    "fault": fault,
    "result": result,
    "test": test,
    "seconds": round(time.monotonic() - start),
    "diff": "\n".join([fault.file, *diff]),
  }


def covering_tests(lines: pathlib.Path, fault: Fault, source: str) -> list[str]:
  """Returns the tests that run a fault's statement, those of its file first."""
  data = coverage.CoverageData(str(lines))
  data.read()
  statement = max(
    (
      node
      for node in ast.walk(ast.parse(source))
      if isinstance(node, ast.stmt)
      and node.lineno <= fault.line <= (node.end_lineno or 0)
    ),
    key=lambda node: node.lineno,
  )
  body_lines = [x.lineno for x in getattr(statement, "body", [])]
  last = min([*body_lines, (statement.end_lineno or 0) + 1])
  stem = pathlib.Path(fault.file).stem
  tests = {
    context.partition("|")[0].partition("[")[0]
    for file in data.measured_files()
    if file.endswith(fault.file)
    for line, contexts in data.contexts_by_lineno(file).items()
    if statement.lineno <= line < last
    for context in contexts
    if context
  }
  return sorted(tests, key=lambda x: (f"test_{stem}.py" not in x, x))


def likely_tests(
  tree: pathlib.Path, fault: Fault, source: str
) -> list[list[str]]:
  """Returns arguments of pytest: the likeliest tests first, then the folder."""
  package, project, *_ = fault.file.split("/")
  stem = pathlib.Path(fault.file).stem
  folder = f"tests/{package}"
  if package == "projects":
    folder = f"projects/{project}/tests"
  folders = [folder, *_JUDGES_ELSEWHERE.get(package, ())]
  words = {stem} | {
    node.name
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    and node.lineno <= fault.line <= (node.end_lineno or 0)
  }
  near = {}
  for path in sorted((tree / folder).rglob("test_*.py")):
    matches = [x for x in words if re.search(rf"\b{x}\b", path.read_text())]
    if matches or path.stem == f"test_{stem}":
      near[str(path.relative_to(tree))] = (
        path.stem != f"test_{stem}",
        -len(matches),
      )
  first = sorted(near, key=near.__getitem__)
  factories = re.findall(r"^@attention_factory\ndef (\w+)", source, re.M)
  if package == "attention" and stem in JUDGES:
    factories = [JUDGES[stem]]
  contracts = [[f"--of={x}", *folders] for x in factories[:2]]
  return [*contracts, [*first, *folders]]


def summary(results: list[dict]) -> str:
  """Returns the survivors and the share of caught faults, with a 95 % interval."""
  equivalent = json.loads(_EQUIVALENT.read_text())
  counted = [x for x in results if x["diff"] not in equivalent]
  caught, n = sum(x["result"] == "caught" for x in counted), len(counted)
  z = 1.96
  centre = (caught + z * z / 2) / (n + z * z)
  half = (
    z / (n + z * z) * (caught * (n - caught) / max(n, 1) + z * z / 4) ** 0.5
  )
  survivors = [x for x in counted if x["result"] != "caught"]
  return "\n".join(
    [
      *(f"{x['result']} {x['diff']}" for x in survivors),
      f"{caught} of {n} faults are caught, {caught / max(n, 1):.0%} "
      f"({centre - half:.0%} to {centre + half:.0%}); "
      f"{len(results) - n} more change nothing",
    ]
  )


if __name__ == "__main__":
  sys.exit(main())
