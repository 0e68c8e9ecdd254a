"""Writes files atomically, JSON files with a digest."""

from collections.abc import Mapping
import hashlib
import json
import os
from pathlib import Path
import secrets
from typing import Any

from settings import json_text

_DIGEST = "sha256"


def read_json(path: Path) -> dict[str, Any] | None:
  """Returns the JSON object in a file; None if it is missing or damaged.

  It verifies and removes the digest that `write_json` added.
  """
  try:
    content = json_text.loads(path.read_text("utf-8"))
  except (OSError, ValueError):
    return None
  if not isinstance(content, dict):
    return None
  digest = content.pop(_DIGEST, None)
  return content if digest in (None, _digest(content)) else None


def write_json(path: Path, content: Mapping[str, Any]) -> None:
  """Writes JSON with its digest, atomically."""
  # The digest must match the JSON as it is read, in which all keys are strings.
  record = json.loads(json.dumps(content))
  record[_DIGEST] = _digest(record)
  write_text(path, json.dumps(record, indent=2, sort_keys=True) + "\n")


def _digest(content: Mapping[str, Any]) -> str:
  text = json.dumps(content, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def write_text(path: Path, text: str) -> None:
  """Writes text in UTF-8, atomically."""
  write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
  """Writes a file atomically; several processes may write it at the same time."""
  # A random name, because processes on two hosts may have the same id.
  partial = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
  try:
    partial.write_bytes(content)
    os.replace(partial, path)
  except BaseException:
    partial.unlink(missing_ok=True)
    raise
