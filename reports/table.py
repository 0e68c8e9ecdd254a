"""One row a run, for other programs: results.csv and results.jsonl."""

from collections.abc import Iterable, Mapping, Sequence
import csv
import json
from pathlib import Path
from typing import Any

from attention import ATTENTIONS
from comparison.records import Record
from reports import numbers, quality

MECHANISMS = tuple(ATTENTIONS)
"""Order of mechanisms in tables and plots; variants come after them."""

_RUN = ("task", "attention", "seed", "status", "parameters")
_RUN += ("unmatched_parameters", "seconds", "cpu_seconds", "peak_bytes")
_RUN += ("others_cores", "together")
_RUN += ("slots", "options", "learning_rate")


def rows(found: Sequence[Record]) -> list[dict[str, Any]]:
  """Everything scalar of every run; all rows have all columns.

  A value that a run does not have, or that is infinite, is None.
  """
  ordered = sorted(
    found,
    key=lambda r: (
      r["task"],
      rank(r["attention"]),
      across_rank(r.get("across", {})),
      r["seed"],
    ),
  )
  partial = [_row(record) for record in ordered]
  names = dict.fromkeys(name for row in partial for name in row)
  # What explains a row is at its end.
  for name in ("reason", "command"):
    if name in names:
      names[name] = names.pop(name)
  return [{name: row.get(name) for name in names} for row in partial]


def write(workdir: Path, found: Sequence[Record]) -> None:
  """Writes results.jsonl and results.csv, the same rows in both."""
  content = rows(found)
  with (workdir / "results.jsonl").open("w") as file:
    file.writelines(json.dumps(row) + "\n" for row in content)
  write_csv(workdir / "results.csv", content)


def write_csv(path: Path, content: Sequence[Mapping[str, Any]]) -> None:
  """Writes rows that all have the same columns, and a line with their names."""
  with path.open("w", newline="", encoding="utf-8") as file:
    writer = csv.DictWriter(file, list(content[0]) if content else [])
    writer.writeheader()
    writer.writerows(content)


def command(record: Record) -> str:
  """What makes the run again."""
  return "python train.py " + " ".join(record["arguments"])


def value(record: Record, name: str) -> float | None:
  """A number of a run by its column; None where it has none."""
  found = _row(record).get(name)
  return found if quality.is_number(found) else None


def ordered(labels: Iterable[str]) -> list[str]:
  """Labels of mechanisms, each once, in the order of tables and plots."""
  return sorted(dict.fromkeys(labels), key=rank)


def rank(label: str) -> tuple[int, str]:
  """Sorts the mechanisms in their order, then variants by name."""
  known = label in MECHANISMS
  return (MECHANISMS.index(label) if known else len(MECHANISMS), label)


def across_rank(across: Mapping[str, Any]) -> list[tuple[float, str]]:
  """Sorts the rows of one mechanism by their values, numbers by size."""
  return [numbers.by_size(str(across[leaf])) for leaf in sorted(across)]


def _row(record: Record) -> dict[str, Any]:
  measured = record.get("measured", {})
  return {
    **{name: _scalar(record.get(name)) for name in _RUN},
    **{
      leaf: _scalar(v)
      for field in ("across", "grid")
      for leaf, v in record.get(field, {}).items()
    },
    **quality.metrics(record.get("final", {})),
    "best_quality": quality.best(record),
    **{name: _scalar(v) for name, v in measured.items() if _is_scalar(v)},
    "reason": record.get("reason") or None,
    "command": command(record),
  }


def _is_scalar(found: Any) -> bool:
  return found is None or isinstance(found, (bool, int, float, str))


def _scalar(found: Any) -> Any:
  """As it is, but no NaN: JSON has none."""
  is_real = isinstance(found, float)
  return found if not is_real or quality.is_number(found) else None
