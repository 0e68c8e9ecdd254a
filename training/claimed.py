"""A folder that belongs to one command, and says what it holds."""

from collections.abc import Iterator, Mapping
import contextlib
import fcntl
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from settings.errors import ConfigError


def check(
  workdir: Path, file: str, what: Mapping[str, Any], kind: str, leaf: str
) -> None:
  """Checks that `workdir` is free, or that it holds just this.

  Args:
    workdir: a folder.
    file: name of the JSON in it that says what it holds.
    what: that this command would write there, JSON-ready.
    kind: of what it holds, for messages: 'comparison'.
    leaf: what comes before a name of `what` where it is typed: 'config.'.

  Raises:
    ConfigError: it holds something else.
  """
  path = workdir / file
  if path.exists():
    recorded = parsed(path)
    if recorded is None:
      raise ConfigError(f"workdir: {path} is damaged; choose a new folder")
    for name in sorted({*recorded, *what}):
      if recorded.get(name) != what.get(name):
        raise ConfigError(
          f"workdir: {workdir} holds another {kind}: {leaf}{name} is "
          f"{recorded.get(name)!r} there and {what.get(name)!r} here; choose a "
          "new folder"
        )
  elif workdir.exists() and (not workdir.is_dir() or any(workdir.iterdir())):
    raise ConfigError(
      f"workdir: {workdir} holds other files and no {kind}; choose a new folder"
    )


def claim(workdir: Path, file: str, what: Mapping[str, Any]) -> None:
  """Makes the folder and says in it what it holds.

  Raises:
    ConfigError: it cannot be made.
  """
  try:
    workdir.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise ConfigError(f"workdir: {error}") from error
  replace(workdir / file, what)


@contextlib.contextmanager
def held(workdir: Path) -> Iterator[None]:
  """Within it, no other process has the folder; a process that is killed frees it.

  Raises:
    ConfigError: another one has it.
  """
  folder = os.open(workdir, os.O_RDONLY)
  try:
    try:
      fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise ConfigError(
        f"workdir: another process writes in {workdir}; wait for it, or choose a "
        "new folder"
      ) from None
    except OSError:  # Some network's file systems lock nothing.
      pass
    yield
  finally:
    os.close(folder)


_DIGEST = "sha256"


def parsed(path: Path) -> dict[str, Any] | None:
  """The JSON object in a file; None where there is none, or a damaged one.

  The digest that `replace` writes is compared and left out.
  """
  try:
    content = json.loads(path.read_text())
  except (OSError, ValueError):
    return None
  if not isinstance(content, dict):
    return None
  digest = content.pop(_DIGEST, None)
  return content if digest in (None, _digest(content)) else None


def replace(path: Path, content: Mapping[str, Any]) -> None:
  """Writes JSON with its digest, as `replace_text` does."""
  # The digest is of what is read again, where all keys are text.
  written = json.loads(json.dumps(content))
  written[_DIGEST] = _digest(written)
  replace_text(path, json.dumps(written, indent=2, sort_keys=True) + "\n")


def _digest(content: Mapping[str, Any]) -> str:
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def replace_text(path: Path, text: str) -> None:
  """Writes a text in UTF-8, as `replace_bytes` does."""
  replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
  """Writes a file, whole or not at all; several processes may do so at once."""
  partial = path.with_suffix(f".{os.getpid()}.tmp")
  partial.write_bytes(content)
  os.replace(partial, path)
