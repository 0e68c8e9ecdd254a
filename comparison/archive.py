"""Packs the records of a comparison into one small file, and unpacks them."""

import json
import lzma
from pathlib import Path
from typing import Any

from comparison import records
from settings import atomic, json_text
from settings.errors import ConfigError
from training import metrics


def pack(workdir: Path, path: Path) -> int:
  """Writes the records of a comparison as `.jsonl.xz`, one line per record.

  The first line has the settings that all runs share, and the plan, references and
  scaling if there are any. Attention maps, which take most of a folder's bytes, are
  omitted, and metrics on training data are rounded to five digits. The same records
  give the same bytes.

  Args:
    workdir: the folder of the comparison.
    path: the file, which is replaced.

  Returns:
    The number of records.

  Raises:
    ConfigError: the file cannot be written.
  """
  head = {
    "comparison": atomic.read_json(workdir / records.COMPARISON),
    "references": records.read_references(workdir),
    "scaling": metrics.read(workdir, records.SCALING),
  }
  if plan := records.planned_runs(workdir):
    head["plan"] = plan
  run_records = records.by_identity(workdir)
  for record in run_records.values():
    record.get("measured", {}).pop("map", None)
    for line in record.get("history", ()):
      if line["split"] == "train":  # No table or curve shows more digits.
        line |= {
          k: float(f"{x:.5g}") for k, x in line.items() if type(x) is float
        }
  lines = [
    head,
    *({"run": name, **record} for name, record in run_records.items()),
  ]
  text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
  try:
    atomic.write_bytes(path, lzma.compress(text.encode()))
  except (OSError, ValueError) as error:  # A path may have no name.
    reason = getattr(error, "strerror", None) or error
    raise ConfigError(f"--records: {path}: {reason}") from error
  return len(run_records)


def read(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
  """Reads a packed comparison: its first line, and the records by run identity.

  Raises:
    ConfigError: the file is missing or damaged.
  """
  try:
    with lzma.open(path, "rt", encoding="utf-8") as file:
      # An empty file has no comparison.
      head, *lines = [json_text.loads(line) for line in file] or [{}]
    dict(head["comparison"])
    for name in ("references", "plan"):
      dict(head.get(name) or {})
    [dict(row) for row in head.get("scaling") or ()]
    run_records = {Path(record.pop("run")).name: record for record in lines}
    if not all({"task", "status"} <= x.keys() for x in run_records.values()):
      raise KeyError("status")
    return head, run_records
  except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
    raise ConfigError(f"--records: {path}: {error}") from error
  except (KeyError, TypeError, AttributeError):
    raise ConfigError(
      f"--records: {path}: no records that `compare.py pack` wrote"
    ) from None


def unpack(path: Path, workdir: Path) -> None:
  """Creates the folder of a comparison from a file that `pack` wrote.

  The comparison can be continued there; runs that are done are not run again.

  Args:
    path: the file.
    workdir: a new folder, or a folder of this comparison. Its content is kept, except
      for records of runs that are done only in the file.

  Raises:
    ConfigError: the file is missing or damaged; or the folder has other files.
  """
  head, run_records = read(path)
  records.claim(workdir, head["comparison"])
  if not records.read_references(workdir):
    records.write_references(workdir, head.get("references") or {})
  scaling = head.get("scaling")
  if scaling and not (workdir / records.SCALING).exists():
    lines = "".join(json.dumps(row) + "\n" for row in scaling)
    atomic.write_text(workdir / records.SCALING, lines)
  (workdir / records.RECORDS).mkdir(exist_ok=True)
  if plan := head.get("plan"):
    records.store_plan(workdir, plan | records.planned_runs(workdir))
  existing = records.by_identity(workdir)
  for name, record in run_records.items():
    is_done = existing.get(name, {}).get("status") == records.DONE
    is_newly_done = record["status"] == records.DONE and not is_done
    if name not in existing or is_newly_done:
      records.update(workdir, name, **record)
