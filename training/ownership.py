"""Ownership of a folder by one run or comparison, which a file in it describes."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from settings import atomic
from settings.errors import ConfigError, RunError

DATA = "data"
"""Key in a folder's description: maps names to digests of the data of its content."""


def check(
  workdir: Path, file: str, what: Mapping[str, Any], kind: str, prefix: str
) -> None:
  """Checks that `workdir` is free, or that its description is `what`.

  Args:
    workdir: a folder.
    file: name of the JSON file in it that describes its content.
    what: the description that this command would write there, JSON-ready. If both
      have `DATA`, these must be equal; an earlier version stored none.
    kind: the kind of content, for messages: 'comparison'.
    prefix: prefix of the names in `what` on the command line: 'config.'.

  Raises:
    ConfigError: the folder has other content.
  """
  path = workdir / file
  if path.exists():
    recorded = atomic.read_json(path)
    if recorded is None:
      raise ConfigError(f"workdir: {path} is damaged; choose a new folder")
    for name in sorted({*recorded, *what} - {DATA}):
      # A field that is None differs from one that is not set.
      there, here = (
        {x: y[x] for x in [name] if x in y} for y in (recorded, what)
      )
      if there != here:
        raise ConfigError(
          f"workdir: {workdir} holds another {kind}: {prefix}{name} is "
          f"{there.get(name, 'not set')!r} there and {here.get(name, 'not set')!r} "
          "here; choose a new folder"
        )
    if DATA in recorded and DATA in what:
      there, here = recorded[DATA], what[DATA]
      for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
          raise ConfigError(
            f"workdir: {workdir} holds a {kind} of other data: {name} is not the "
            "file with which it started; restore it or choose a new folder"
          )
  elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise ConfigError(
      f"workdir: {workdir} holds other files and no {kind}; choose a new folder"
    )


def claim(
  workdir: Path, file: str, what: Mapping[str, Any], wait: bool = True
) -> None:
  """Creates the folder and writes its description.

  Args:
    workdir: a folder that `check` accepted.
    file: as in `check`.
    what: as in `check`.
    wait: as in `lock`.

  Raises:
    ConfigError: the folder cannot be created, or another process claimed it for
      something else.
    RunError: as in `lock`.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(f"workdir: {error}") from error
  path, described = workdir / file, json.loads(json.dumps(what))
  with lock(workdir, wait):
    recorded = atomic.read_json(path) or {}
    data = {DATA: recorded[DATA]} if DATA in recorded else {}
    content = {**data, **described}
    # An earlier version stored no data.
    without_data = {name: x for name, x in content.items() if name != DATA}
    if recorded not in ({}, content, without_data):
      raise ConfigError(
        f"workdir: another process started something else in {workdir}; choose a "
        "new folder"
      )
    atomic.write_json(path, content)


@contextlib.contextmanager
def lock(workdir: Path, wait: bool = False) -> Iterator[None]:
  """Locks a folder against other processes; the lock of a killed process is released.

  Args:
    workdir: an existing folder.
    wait: whether to wait for the lock, for use if others hold it only briefly.

  Raises:
    RunError: another process holds the lock.
  """
  folder = os.open(workdir, os.O_RDONLY)
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB * (not wait))
    except BlockingIOError:
      raise RunError(
        f"workdir: another process writes in {workdir}; wait for it, or choose a "
        "new folder"
      ) from None
    except OSError:  # Some network file systems have no locks.
      pass
    yield
  finally:
    os.close(folder)
