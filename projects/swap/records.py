"""The stored results of each mechanism, one small file per mechanism."""

from collections.abc import Iterator, Mapping
import contextlib
from pathlib import Path
from typing import Any

from attention import ATTENTIONS
from projects.swap.settings import Settings, file_name
from settings import atomic
from settings.errors import ConfigError
from training import ownership

OWN = "own"
"""Label of the original model."""

SWAP = "swap.json"
RECORDS, MODELS, RUNS = "records", "models", "finetune"
DONE, CANNOT = "done", "cannot serve"

Record = dict[str, Any]
"""The measurements of one mechanism by `measure`, JSON-ready."""


def check(workdir: Path, settings: Settings) -> None:
  """Checks that `workdir` is new or belongs to the same swap.

  Mechanisms may be added later; no other option may change.

  Raises:
    ConfigError: `workdir` has other content.
  """
  ownership.check(workdir, SWAP, settings.shared(), "swap", "--")


@contextlib.contextmanager
def lock(
  workdir: Path, settings: Settings, data: Mapping[str, str]
) -> Iterator[None]:
  """Locks `workdir` for this swap and this process.

  Args:
    workdir: a new folder, or the folder of the same swap.
    settings: the options of the swap.
    data: digests of the data, from its `Source`.

  Raises:
    ConfigError: its rows come from other data, or another process has claimed it since
      `check`.
    RunError: another process writes to it.
  """
  shared = settings.shared() | {ownership.DATA: dict(data)}
  ownership.check(workdir, SWAP, shared, "swap", "--")
  ownership.claim(workdir, SWAP, shared, wait=False)
  with ownership.lock(workdir):
    for name in (RECORDS, MODELS):
      (workdir / name).mkdir(exist_ok=True)
    yield


def read(workdir: Path, label: str) -> Record | None:
  """Returns the record of a mechanism; None if it is missing or damaged.

  Raises:
    ConfigError: the file has the record of a mechanism that is spelled differently.
  """
  record = atomic.read_json(_path(workdir, label))
  if not record or "attention" not in record:
    return None
  if record["attention"] != label:
    raise ConfigError(
      f"--attention: {_path(workdir, label)} already has the results of "
      f"{record['attention']!r}; expected the same spelling, got {label!r}"
    )
  return record


def read_all(workdir: Path) -> list[Record]:
  """Returns all intact records: the original model, then mechanisms in order."""
  records = [
    atomic.read_json(path)
    for path in sorted((workdir / RECORDS).glob("*.json"))
  ]
  intact = [record for record in records if record and "attention" in record]
  names = list(ATTENTIONS)

  def rank(record):
    name = record["name"]
    index = names.index(name) if name in names else len(names)
    return record["attention"] != OWN, index, record["attention"]

  return sorted(intact, key=rank)


def write(workdir: Path, record: Mapping[str, Any]) -> None:
  """Writes the record of a mechanism atomically."""
  atomic.write_json(_path(workdir, record["attention"]), record)


def folder_name(label: str, keep: int = 0) -> str:
  """Returns the folder of a swapped model in models/: `performer`, `lsh-keep-2`."""
  name = file_name(label)
  return f"{name}-keep-{keep}" if keep else name


def _path(workdir: Path, label: str) -> Path:
  return workdir / RECORDS / f"{folder_name(label)}.json"
