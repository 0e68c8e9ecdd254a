"""Records as tables: one row a run, and one a mechanism over its seeds."""

from collections.abc import Sequence
import csv
import json
import math
from pathlib import Path
import statistics
from typing import Any

from comparison import records
from comparison.records import Record
from training.metrics import format_number

_COLUMNS = (
  "task",
  "attention",
  "seed",
  "status",
  "parameters",
  "unmatched_parameters",
  "seconds",
  "cpu_seconds",
  "peak_bytes",
)
# Two-sided 95 % of Student's t, by degrees of freedom 1 … 10.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def write(workdir: Path, found: Sequence[Record]) -> str:
  """Writes results.jsonl, results.csv and report.md; returns the last.

  Args:
    workdir: of the comparison.
    found: its records, also those that failed or cannot be.
  """
  rows = [_row(record) for record in found]
  with (workdir / "results.jsonl").open("w") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
  names = list(dict.fromkeys(name for row in rows for name in row))
  with (workdir / "results.csv").open("w", newline="") as file:
    writer = csv.DictWriter(file, names, restval="")
    writer.writeheader()
    writer.writerows(rows)
  report = markdown(found)
  (workdir / "report.md").write_text(report)
  return report


def markdown(found: Sequence[Record]) -> str:
  """A table a task: mean ± half a 95 % interval over the seeds."""
  lines = []
  for task in dict.fromkeys(record["task"] for record in found):
    of_task = [record for record in found if record["task"] == task]
    done = [r for r in of_task if r["status"] == records.DONE]
    metrics = list(dict.fromkeys(name for r in done for name in _metrics(r)))
    header = ["attention", "seeds", "parameters", "before matching", *metrics]
    header += ["minutes", "peak MiB"]
    lines += [f"## {task}", "", _line(header)]
    lines.append(_line(["---", *["--:"] * (len(header) - 1)]))
    for name in dict.fromkeys(record["attention"] for record in of_task):
      mine = [record for record in of_task if record["attention"] == name]
      lines.append(_line(_cells(name, mine, metrics)))
    commands = {record["attention"]: record for record in of_task}
    lines += ["", "Each run, with its seed:", ""]
    for record in commands.values():
      lines.append(f"    python train.py {' '.join(record['arguments'])}")
    lines.append("")
  return "\n".join(lines)


def interval(values: Sequence[float]) -> str:
  """`mean ± half the 95 % interval` (Student's t); the mean alone for one."""
  mean = format_number(statistics.fmean(values))
  if len(values) < 2:
    return mean
  freedom = len(values) - 1
  t = _T[freedom - 1] if freedom <= len(_T) else 1.96
  half = t * statistics.stdev(values) / math.sqrt(len(values))
  return f"{mean} ± {format_number(half)}"


def _cells(
  name: str, mine: Sequence[Record], metrics: Sequence[str]
) -> list[str]:
  done = [record for record in mine if record["status"] == records.DONE]
  cells = [f"`{name}`", f"{len(done)}/{len(mine)}"]
  if not done:
    return [*cells, f"{mine[0]['status']}: {mine[0]['reason']}"]
  cells += [
    f"{done[0]['parameters']:,}",
    f"{done[0]['unmatched_parameters']:,}",
  ]
  for metric in metrics:
    values = [_metrics(r)[metric] for r in done if metric in _metrics(r)]
    cells.append(interval(values) if values else "–")
  cells.append(interval([record["seconds"] / 60 for record in done]))
  cells.append(interval([record["peak_bytes"] / 2**20 for record in done]))
  failed = [r for r in mine if r["status"] == records.FAILED]
  if failed:
    cells[1] += f" ({failed[0]['reason']})"
  return cells


def _metrics(record: Record) -> dict[str, float]:
  return {
    name: value
    for name, value in record.get("final", {}).items()
    if isinstance(value, (int, float)) and name != "step"
  }


def _row(record: Record) -> dict[str, Any]:
  row = {name: record.get(name, "") for name in _COLUMNS}
  return {
    **row,
    **_metrics(record),
    "reason": record.get("reason", ""),
    "command": "python train.py " + " ".join(record["arguments"]),
  }


def _line(cells: Sequence[str]) -> str:
  return f"| {' | '.join(cells)} |"
