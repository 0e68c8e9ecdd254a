"""Text files: UTF-8, plain or gzipped, one sentence per line."""

import collections
from collections.abc import Iterator
import contextlib
import csv
import gzip
import hashlib
import logging
import pathlib
import re
from typing import Any
import zlib

from tasks.base import DataError, vocabulary_path

Pairs = list[tuple[str, str]]

DATA = "data.sha256"
"""File of a run with the digests of its data, next to its vocabulary."""

_BLOCK = 2**20

_VALIDATION = ("val", "valid", "validation")


def typed_path(text: str) -> pathlib.Path:
  """The path of `task.path`, with `~` expanded; DataError if there is no such user."""
  try:
    return pathlib.Path(text).expanduser()
  except RuntimeError as error:  # ~nosuchuser
    raise DataError(f"{text}: {error} (task.path)") from error


def existing_file(text: str) -> pathlib.Path:
  """The path of `task.path`; DataError if the file does not exist."""
  path = typed_path(text)
  if not path.is_file():
    problem = "a folder, expected a file" if path.is_dir() else "no such file"
    raise DataError(f"{path}: {problem} (task.path)")
  return path


Notes = dict[pathlib.Path | str, str]
"""Maps files and names of datasets to the SHA-256 of their content."""

_notes: list[Notes] = []

_MOST_NAMES = 1000
"""With more files, only one digest of all their digests is stored."""


@contextlib.contextmanager
def record_digests() -> Iterator[Notes]:
  """Records the digests of all files that are read in this context."""
  notes: Notes = {}
  _notes.append(notes)
  try:
    yield notes
  finally:
    _notes.pop()


def note(name: pathlib.Path | str, content: bytes) -> None:
  """Records data that a run read, for `record_digests`."""
  if _notes:
    _record_digest(name, hashlib.sha256(content).hexdigest())


def note_file(path: pathlib.Path) -> str:
  """Records and returns the digest of an unpacked file that is read in parts."""
  with open_bytes(path) as file:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
  _record_digest(path, digest)
  return digest


def _record_digest(name: pathlib.Path | str, digest: str) -> None:
  for notes in _notes:
    notes[name] = digest


def name_digests(notes: Notes) -> dict[str, str]:
  """Maps names of files to digests; a name does not change if its folder is moved.

  The name of a file is the last two parts of its path, 'folder/name', or more if
  that is not unique.
  """
  names: dict[pathlib.Path | str, str] = {}
  paths = [key for key in notes if isinstance(key, pathlib.Path)]
  length = 2
  while paths:
    ends = {path: _end(path, length) for path in paths}
    counts = collections.Counter(ends.values())
    for path, end in ends.items():
      if counts[end] == 1 or len(path.parts) <= length:
        names[path] = end
    paths = [path for path in paths if path not in names]
    length += 1
  return _limit_digests(
    {names.get(key, str(key)): x for key, x in notes.items()}
  )


def _end(key: pathlib.Path | str, length: int = 2) -> str:
  return key if isinstance(key, str) else "/".join(key.parts[-length:])


def _limit_digests(named_digests: dict[str, str]) -> dict[str, str]:
  if len(named_digests) <= _MOST_NAMES:
    return named_digests
  text = repr(sorted(named_digests.items())).encode()
  name = f"{len(named_digests)} files"
  return {name: hashlib.sha256(text).hexdigest()}


def recorded_data(workdir: pathlib.Path) -> dict[str, str]:
  """Maps names of the data with which the run in `workdir` started to digests."""
  path = vocabulary_path(workdir, DATA)
  if not path.exists():
    return {}
  lines = path.read_text("utf-8", "replace").split("\n")[:-1]
  return {
    name: digest for digest, _, name in (x.partition("  ") for x in lines)
  }


def check_data(workdir: pathlib.Path, notes: Notes) -> bytes:
  """Checks a run's data against its digests, and returns these as `sha256sum` does.

  Raises:
    DataError: the run in `workdir` started with other data.
  """
  digests, recorded = name_digests(notes), recorded_data(workdir)
  # Earlier versions used the last two parts of the path of every file.
  old = _limit_digests({_end(key): digest for key, digest in notes.items()})
  if recorded and recorded != old:
    for name in sorted(digests.keys() | recorded.keys()):
      if digests.get(name) != recorded.get(name):
        path = vocabulary_path(workdir, DATA)
        raise DataError(
          f"config.task: {name} has changed since the run in {workdir} began "
          f"({path}); restore it or choose a new folder"
        )
  lines = (f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
  return "".join(lines).encode()


@contextlib.contextmanager
def open_bytes(path: pathlib.Path) -> Iterator[Any]:
  """Opens a file as bytes and unpacks `.gz`; DataError if that fails."""
  try:
    is_packed = path.suffix.lower() == ".gz"
    with gzip.open(path) if is_packed else path.open("rb") as file:
      yield file
  except (gzip.BadGzipFile, EOFError, zlib.error) as error:
    raise DataError(f"{path}: damaged gzip file ({error})") from error
  except OSError as error:
    raise DataError(f"{path}: {error.strerror}") from error


def suffix(path: pathlib.Path) -> str:
  """The suffix that determines a file's format: '.jsonl' of 'a.JSONL.gz'."""
  return pathlib.Path(path.name.lower().removesuffix(".gz")).suffix


@contextlib.contextmanager
def long_cells() -> Iterator[None]:
  """Removes the csv module's limit of 131,072 characters per cell."""
  limit = csv.field_size_limit(2**31 - 1)
  try:
    yield
  finally:
    csv.field_size_limit(limit)


def read_bytes(path: pathlib.Path) -> bytes:
  """Reads a file and unpacks `.gz`; DataError if that fails."""
  with open_bytes(path) as file:
    content = file.read()
  note(path, content)
  return content


def text_blocks(path: pathlib.Path) -> Iterator[str]:
  r"""Yields UTF-8 text with "\n" line ends, about a megabyte at a time.

  Raises:
    DataError: the file cannot be read; the message has the number of an invalid
      line.
  """
  with open_bytes(path) as file:
    line, encoding = 1, "utf-8-sig"
    while lines := file.readlines(_BLOCK):
      data = b"".join(lines)
      try:
        # The byte order mark does not belong to the first sentence.
        yield data.decode(encoding).replace("\r\n", "\n")
      except UnicodeDecodeError as error:
        # `error.object` has no byte order mark.
        line += error.object.count(b"\n", 0, error.start)
        byte = error.object[error.start]
        raise DataError(
          f"{path}, line {line}: byte 0x{byte:02x} is not UTF-8; convert the file"
        ) from error
      line, encoding = line + len(lines), "utf-8"


def read_text(path: pathlib.Path) -> str:
  r"""Reads UTF-8 with "\n" line ends, or raises DataError with the line number."""
  note_file(path)
  return "".join(text_blocks(path))


def read_lines(path: pathlib.Path) -> list[str]:
  r"""Reads lines, split only at "\n": U+2028 and similar characters are text."""
  lines = read_text(path).split("\n")
  return lines[:-1] if lines[-1] == "" else lines


class AlignedFiles:
  """A folder of aligned text: `train.en` and `train.de`, `val.*`, `test*.*`.

  Attributes:
    splits: maps split names to (source file, target file); 'train' and 'validation'
      (from val, valid or validation) always exist, and each `test*` that has both
      languages is a split of that name.

  Raises:
    DataError: the folder or a file is missing; the message has the expected names.
  """

  def __init__(self, folder: pathlib.Path, source: str, target: str):
    if not folder.is_dir():
      raise DataError(f"{folder}: no such folder (task.path)")
    self.splits = {
      "train": _find_pair(folder, ("train",), source, target),
      "validation": _find_pair(folder, _VALIDATION, source, target),
    }
    pattern = re.compile(rf"(test.*)\.{re.escape(source)}(\.gz)?")
    matches = (pattern.fullmatch(path.name) for path in folder.iterdir())
    for stem in sorted({match[1] for match in matches if match}):
      if _find(folder, stem, target) is None:
        logging.getLogger(__name__).warning(
          "%s: %s.%s has no matching %s.%s and is omitted",
          folder,
          stem,
          source,
          stem,
          target,
        )
        continue
      self.splits[stem] = _find_pair(folder, (stem,), source, target)

  def digest(self) -> str:
    """SHA-256 over the names of the splits and the bytes of their files."""
    digest = hashlib.sha256()
    for name, paths in self.splits.items():
      for path in paths:
        try:
          content = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
          raise DataError(f"{path}: {error.strerror}") from error
        digest.update(f"{name} {path.name} {content}\n".encode())
    return digest.hexdigest()

  def read(self, split: str) -> Pairs:
    """Reads a split.

    Raises:
      DataError: a file is not UTF-8, the line counts differ, or the split is empty.
    """
    source, target = self.splits[split]
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
      raise DataError(
        f"{source} has {len(sources)} lines and {target.name} has "
        f"{len(targets)}: line n of one must translate line n of the other"
      )
    if not sources:
      raise DataError(f"{source}: empty {split} split")
    return list(zip(sources, targets, strict=True))


def _find(
  folder: pathlib.Path, stem: str, language: str
) -> pathlib.Path | None:
  for name in (f"{stem}.{language}", f"{stem}.{language}.gz"):
    if (folder / name).is_file():
      return folder / name
  return None


def _find_pair(
  folder: pathlib.Path, stems: tuple[str, ...], source: str, target: str
) -> tuple[pathlib.Path, pathlib.Path]:
  """Finds both languages of the first stem that exists."""
  for stem in stems:
    pair = _find(folder, stem, source), _find(folder, stem, target)
    if pair[0] and pair[1]:
      return pair[0], pair[1]
    if pair[0] or pair[1]:
      stems = (stem,)
      break
  missing = [
    language
    for language in (source, target)
    if not any(_find(folder, stem, language) for stem in stems)
  ]
  expected = " and ".join(
    " or ".join(f"{stem}.{language}[.gz]" for stem in stems)
    for language in missing
  )
  raise DataError(
    f"{folder}: no {expected} (task.path, task.source_language, "
    "task.target_language)"
  )
