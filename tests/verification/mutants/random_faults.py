"""Plants random faults, one at a time, and measures how many the suite catches.

    python -m pip install cosmic-ray pytest-cov   # In an environment of its own: see below.
    COVERAGE_FILE=lines python -m pytest -m "not thorough" --cov --cov-context=test tests/tasks
    python -m tests.verification.mutants.random_faults --faults=300 --seed=1 --record=faults.jsonl --lines=lines

The second command is optional. It records which tests run which line, once for each
folder of tests, and a fault is then tried against those tests alone; `coverage
combine` makes one file of several. Without a record of its line, a fault is tried
against the tests of its folder.

The suite does not depend on cosmic-ray. A second environment that sees the packages
of `.venv` through a `.pth` file is enough. A fault is a random line of the product
and one random mutation of it: an operator, a comparison, a number, a condition, two
arguments swapped, a keyword argument dropped. Each line of the record is a fault and
its result, so that the same command continues a record that was interrupted.
Survivors that change nothing go into `equivalent.json` with the reason.
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
from tests.verification.mutants.operators import mutated, mutations
from tests.verification.mutants.trial import FAILED, copy, run

FOLDERS = ("attention", "models", "training", "tasks", "comparison", "projects")
_SKIPPED = re.compile(r"attention/(definitions|testing)/|/(tests|configs)/")
_JUDGES_ELSEWHERE = {
  "attention": ["tests/verification/peers"],
  # Of published weights, and of the defaults of every config.
  "projects": ["tests/models/published", "tests/training/test_config_help.py"],
  "comparison": ["tests/test_compare.py"],
}
"""Package: tests outside its own folder that judge it."""

_EQUIVALENT = pathlib.Path(__file__).parent / "equivalent.json"


class Fault(NamedTuple):
  """One mutation of one line.

  Attributes:
    file: the path from the root of the tree.
    line: the number of the line, from 1.
    operator: the mutation operator.
    occurrence: which of the operator's places in the file.
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
    "--limit", type=float, default=1200.0, help="seconds each"
  )
  parser.add_argument("--record", type=pathlib.Path, required=True)
  parser.add_argument("--lines", type=pathlib.Path, help="coverage's file")
  flags = parser.parse_args()
  flags.record.touch()
  results = [json.loads(x) for x in flags.record.read_text().splitlines()]
  done = {tuple(result["fault"]) for result in results}
  with tempfile.TemporaryDirectory() as folder:
    tree = copy(pathlib.Path(folder))
    for _, fault in zip(range(flags.faults), sample(flags.seed), strict=False):
      if fault in done:
        continue
      results.append(tried(tree, fault, flags.limit, flags.lines))
      with flags.record.open("a") as record:
        record.write(json.dumps(results[-1]) + "\n")
      print(results[-1]["result"], results[-1]["diff"], sep="\n", flush=True)
  print(summary(results))


def sample(seed: int) -> Iterator[Fault]:
  """Faults of random lines, without end: each line once, one mutation of each."""
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
    choices = [x for x in _mutations(file) if x[0] == line]
    generator.shuffle(choices)
    source = (ROOT / file).read_text()
    for _, operator, occurrence in choices:
      if mutated(source, operator, occurrence) != source:
        yield Fault(file, line, operator, occurrence)
        break


@functools.cache
def _mutations(file: str) -> list[tuple[int, str, int]]:
  """Line, operator and occurrence of every mutation."""
  source = (ROOT / file).read_text()
  ignored = _ignored(source)
  return [
    (start[0], operator, occurrence)
    for operator, occurrence, start in mutations(source)
    if not any(first <= start < last for first, last in ignored)
  ]


def _ignored(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
  """Spans that no test needs to judge.

  They are annotations, decorators, docstrings, error messages, logging, and the
  sizes that configs and benchmarks use.
  """
  lines = source.splitlines()

  def place(line: int, offset: int) -> tuple[int, int]:
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
    (place(x.lineno, x.col_offset), place(x.end_lineno, x.end_col_offset))
    for x in nodes
    if x is not None
  ]


def tried(
  tree: pathlib.Path, fault: Fault, limit: float, lines: pathlib.Path | None
) -> dict:
  """The result of a fault that is planted in a tree, and taken out again."""
  path = tree / fault.file
  source = path.read_text()
  text = mutated(source, fault.operator, fault.occurrence)
  compared = difflib.ndiff(source.splitlines(), text.splitlines())
  diff = [line for line in compared if line.startswith(("- ", "+ "))]
  start, result, test = time.monotonic(), "survived", ""
  try:
    path.write_text(text)
    covering = lines and runs_of_line(lines, fault, source)
    for tests in [covering] if covering else selections(tree, fault, source):
      code, output = run(tree, ["-x", "-n0", *tests], limit)
      if failed := FAILED.search(output):
        result, test = "caught", failed[1]
      elif code is None:
        result = "caught" if output == "hung" else "unfinished"
      # 5: a file without tests that are not `thorough`.
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


def runs_of_line(lines: pathlib.Path, fault: Fault, source: str) -> list[str]:
  """The functions whose tests run the statement of a fault, the nearest first."""
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
  inner = [x.lineno for x in getattr(statement, "body", [])]
  last = min([*inner, (statement.end_lineno or 0) + 1])
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


def selections(
  tree: pathlib.Path, fault: Fault, source: str
) -> list[list[str]]:
  """What pytest is given, the likeliest tests first, at last the whole folder."""
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
    found = [x for x in words if re.search(rf"\b{x}\b", path.read_text())]
    if found or path.stem == f"test_{stem}":
      near[str(path.relative_to(tree))] = (
        path.stem != f"test_{stem}",
        -len(found),
      )
  first = sorted(near, key=near.__getitem__)
  factories = re.findall(r"^@attention_factory\ndef (\w+)", source, re.M)
  if package == "attention" and stem in JUDGES:
    factories = [JUDGES[stem]]
  contracts = [[f"--of={x}", *folders] for x in factories[:2]]
  return [*contracts, [*first, *folders]]


def summary(results: list[dict]) -> str:
  """How many are caught, with Wilson's interval of 95 %, and who survives."""
  equivalent = json.loads(_EQUIVALENT.read_text())
  counted = [x for x in results if x["diff"] not in equivalent]
  caught, n = sum(x["result"] == "caught" for x in counted), len(counted)
  z = 1.96
  centre = (caught + z * z / 2) / (n + z * z)
  half = (
    z / (n + z * z) * (caught * (n - caught) / max(n, 1) + z * z / 4) ** 0.5
  )
  rest = [x for x in counted if x["result"] != "caught"]
  told = [f"{x['result']} {x['diff']}" for x in rest]
  return "\n".join(
    [
      *told,
      f"{caught} of {n} faults are caught, {caught / max(n, 1):.0%} "
      f"({centre - half:.0%} to {centre + half:.0%}); "
      f"{len(results) - n} more change nothing",
    ]
  )


if __name__ == "__main__":
  sys.exit(main())
