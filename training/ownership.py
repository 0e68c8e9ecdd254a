"""A folder that belongs to one command, and says what it holds."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from settings.errors import ConfigError, RunError
from training import atomic

DATA = "data"
"""In what a folder holds: name -> digest of the data that all of it is made from."""


def check(
  workdir: Path, file: str, what: Mapping[str, Any], kind: str, leaf: str
) -> None:
  """Checks that `workdir` is free, or that it holds just this.

  Args:
    workdir: a folder.
    file: name of the JSON in it that says what it holds.
    what: that this command would write there, JSON-ready. Where it and the folder
      have `DATA`, these must be the same; an earlier version kept none.
    kind: of what it holds, for messages: 'comparison'.
    leaf: what comes before a name of `what` where it is typed: 'config.'.

  Raises:
    ConfigError: it holds something else.
  """
  path = workdir / file
  if path.exists():
    recorded = atomic.read_json(path)
    if recorded is None:
      raise ConfigError(f"workdir: {path} is damaged; choose a new folder")
    for name in sorted({*recorded, *what} - {DATA}):
      # A leaf that is None is not one that is left to a file.
      there, here = (
        {x: y[x] for x in [name] if x in y} for y in (recorded, what)
      )
      if there != here:
        raise ConfigError(
          f"workdir: {workdir} holds another {kind}: {leaf}{name} is "
          f"{there.get(name, 'not set')!r} there and {here.get(name, 'not set')!r} "
          "here; choose a new folder"
        )
    if DATA in recorded and DATA in what:
      there, here = recorded[DATA], what[DATA]
      for name in sorted({*there, *here}):
        if there.get(name) != here.get(name):
          raise ConfigError(
            f"workdir: {workdir} holds a {kind} of other data: {name} is not what "
            "it began with; restore it or choose a new folder"
          )
  elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise ConfigError(
      f"workdir: {workdir} holds other files and no {kind}; choose a new folder"
    )


def claim(
  workdir: Path, file: str, what: Mapping[str, Any], wait: bool = True
) -> None:
  """Makes the folder and says in it what it holds.

  Args:
    workdir: a folder that `check` has looked at.
    file: as `check` takes it.
    what: as `check` takes it.
    wait: as `lock` takes it.

  Raises:
    ConfigError: it cannot be made, or another process has made it something else.
    RunError: as `lock`.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(f"workdir: {error}") from error
  path, wanted = workdir / file, json.loads(json.dumps(what))
  with lock(workdir, wait):
    recorded = atomic.read_json(path) or {}
    kept = {DATA: recorded[DATA]} if DATA in recorded else {}
    both = {**kept, **wanted}
    # An earlier version kept no data.
    if recorded not in ({}, both, {n: x for n, x in both.items() if n != DATA}):
      raise ConfigError(
        f"workdir: another process began something else in {workdir}; choose a "
        "new folder"
      )
    atomic.write_json(path, both)


@contextlib.contextmanager
def lock(workdir: Path, wait: bool = False) -> Iterator[None]:
  """Within it, no other process has the folder; a process that is killed frees it.

  Args:
    workdir: a folder that is there.
    wait: until another process frees it, where that takes no time.

  Raises:
    RunError: another one has it.
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
    except OSError:  # Some network's file systems lock nothing.
      pass
    yield
  finally:
    os.close(folder)
