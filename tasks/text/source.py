"""Reads the files of a text: plain text, columns, or token ids."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import csv
import glob
import importlib
import io
import json
import os
import pathlib
import types
from typing import Any

import numpy as np

from settings.errors import DataError, one_line
from tasks import files

_DEFAULT_COLUMN = "text"

_CSV_BLOCK = 2**24
"""Bytes that pyarrow reads at a time; a row may not be larger."""

_BLOCK = 2**24
"""Number of ids that are checked at a time."""

_ROWS = 256
"""Number of rows of a Parquet file that are read at a time."""

_IDS = (".npy", ".bin")
"""Suffixes of files of ids."""

_MAX_SIZE_16 = 2**16
"""Largest size of a vocabulary whose ids have 16 bits."""


def find(path: str) -> list[pathlib.Path]:
  """The files of `task.path`: a file, a pattern such as 'data/*.txt', or a list.

  Files of a pattern are sorted by name. A file that several patterns match is read
  only once, at its first match; otherwise it could be both trained and held out.

  Raises:
    DataError: there is no file, or some files are text and others are ids.
  """
  # Checked first, because a name may contain a comma or a bracket.
  if os.path.exists(files.typed_path(path)):
    file = files.existing_file(path)
    check_unpacked_ids(file)
    return [file]
  unique_paths: dict[str, pathlib.Path] = {}
  for part in filter(None, map(str.strip, path.split(","))):
    matches = sorted(glob.glob(str(files.typed_path(part)), recursive=True))
    if not matches and glob.has_magic(part):
      raise DataError(f"{part}: no file matches (task.path)")
    for file in map(files.existing_file, matches or [part]):
      check_unpacked_ids(file)
      unique_paths.setdefault(os.path.realpath(file), file)
  if not unique_paths:
    raise DataError(f"task.path: expected at least one file, got {path!r}")
  if len({has_ids([file]) for file in unique_paths.values()}) > 1:
    raise DataError(
      f"{path}: expected only files of text or only files of ids, got both (task.path)"
    )
  return [*unique_paths.values()]


def has_ids(paths: Sequence[pathlib.Path]) -> bool:
  """Whether files contain ids instead of text."""
  return paths[0].suffix.lower() in _IDS


def check_unpacked_ids(path: pathlib.Path) -> None:
  """Raises DataError for a packed file of ids, which cannot be memory-mapped."""
  if files.suffix(path) in _IDS and not has_ids([path]):
    raise DataError(
      f"{path}: ids are memory-mapped; unpack the file: gunzip {path.name}"
    )


def read_ids(path: pathlib.Path, count: int) -> np.ndarray:
  """Memory-maps the ids of a file.

  A `.npy` file stores the width of its ids. The ids of a `.bin` file have 16 bits, as
  nanoGPT writes them, or 32 if the vocabulary is too large for 16.

  Args:
    path: a `.npy` or `.bin` file.
    count: size of the vocabulary.

  Raises:
    DataError: the file has no ids, or the ids of a `.bin` seem to be wider.
  """
  if path.suffix.lower() == ".bin":
    return _read_bin(path, count)
  try:
    ids = np.load(path, mmap_mode="r", allow_pickle=False)
  except (OSError, ValueError) as error:
    raise DataError(f"{path}: {one_line(error)}") from error
  if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
    raise DataError(
      f"{path}: expected ids, integers along one axis, got {ids.dtype} of shape "
      f"{ids.shape}"
    )
  return ids


def _read_bin(path: pathlib.Path, count: int) -> np.ndarray:
  bits = 16 if count <= _MAX_SIZE_16 else 32
  prefix = (
    f"{path}: read as ids of {bits} bits, for a vocabulary of {count:,}: "
  )
  try:
    ids = np.memmap(path, f"<u{bits // 8}", mode="r")
  except (OSError, ValueError) as error:
    raise DataError(
      f"{prefix}{one_line(error)}; save them as .npy, which stores their width"
    ) from error
  actual, wider = bits, ids
  while actual < 64 and _upper_halves_are_0(wider):
    actual, wider = 2 * actual, wider[::2]
  if actual > bits:
    raise DataError(
      f"{prefix}every second one is 0, as in ids of {actual} bits; save them as "
      f'.npy: np.save("ids.npy", np.fromfile({str(path)!r}, "uint{actual}"))'
    )
  return ids


def _upper_halves_are_0(ids: np.ndarray) -> bool:
  """Whether pairs of ids could be ids of twice the width."""
  upper = ids[1::2]
  blocks = range(0, len(upper), _BLOCK)
  return len(upper) > 0 and not any(
    upper[start : start + _BLOCK].any() for start in blocks
  )


def text_blocks(paths: Sequence[pathlib.Path], column: str) -> Iterator[str]:
  """Yields the text of files, about a megabyte or one row at a time.

  A line end follows each row of a column, and each file that does not end in one,
  except the last.

  Args:
    paths: `.jsonl` and `.csv`, plain or `.gz`, `.parquet`, or any plain text.
    column: column of files that have columns; '' is 'text'.

  Raises:
    DataError: a file is invalid; the message has one line.
  """
  for number, path in enumerate(paths):
    read = _READERS.get(files.suffix(path))
    if read is None and column:
      raise DataError(
        f"task.column: {path} is plain text, which has no columns; expected "
        f"none, got {column!r}"
      )
    blocks = (
      files.text_blocks(path)
      if read is None
      else _rows(read, path, column or _DEFAULT_COLUMN)
    )
    block = ""
    for block in blocks:
      yield block
    if number < len(paths) - 1 and not block.endswith("\n"):
      yield "\n"


def _rows(
  read: Callable[[pathlib.Path, str], Iterable[Any]],
  path: pathlib.Path,
  column: str,
) -> Iterator[str]:
  """Yields the text of each row of a column, followed by a line end."""
  for number, text in enumerate(read(path, column), 1):
    if not isinstance(text, str):
      raise DataError(
        f"{path}, row {number}: expected text in {column!r} (task.column), got "
        f"{text!r:.60}"
      )
    try:
      text.encode()
    except UnicodeEncodeError as error:  # JSON can have lone UTF-16 surrogates.
      raise DataError(f"{path}, row {number}: {one_line(error)}") from error
    # As in a plain file.
    yield text.replace("\r\n", "\n") + "\n"


def _check_column(where: Any, column: str, names: Sequence[str]) -> None:
  if column not in names:
    raise DataError(
      f"{where}: expected task.column among {', '.join(names) or 'no names'}, got "
      f"{column!r}"
    )


def _json_rows(path: pathlib.Path, column: str) -> Iterator[Any]:
  with files.open_bytes(path) as file:
    for number, line in enumerate(file, 1):
      if not line.strip():
        continue
      try:
        row = json.loads(line)
      except (ValueError, RecursionError) as error:
        raise DataError(
          f"{path}, line {number}: not JSON ({one_line(error)})"
        ) from error
      names = [*row] if isinstance(row, dict) else []
      _check_column(f"{path}, line {number}", column, names)
      yield row[column]


def _csv_rows(path: pathlib.Path, column: str) -> Iterator[Any]:
  pyarrow = _pyarrow(path, "csv")
  try:
    with (
      files.open_bytes(path) as file,
      io.TextIOWrapper(file, "utf-8-sig", newline="") as text,
      files.long_cells(),
    ):
      # Skips empty lines, like pyarrow.
      header = next(filter(None, csv.reader(text)), ())
  except UnicodeDecodeError as error:
    raise DataError(f"{path}: expected UTF-8, {one_line(error)}") from error
  except csv.Error as error:
    raise DataError(f"{path}: {one_line(error)}") from error
  _check_column(path, column, header)
  with files.open_bytes(path) as file, _convert_errors(path):
    batches = pyarrow.open_csv(
      file,
      pyarrow.ReadOptions(block_size=_CSV_BLOCK),
      pyarrow.ParseOptions(newlines_in_values=True),
      pyarrow.ConvertOptions(
        include_columns=[column], column_types={column: "string"}
      ),
    )
    yield from _values(batches)


def _parquet_rows(path: pathlib.Path, column: str) -> Iterator[Any]:
  pyarrow = _pyarrow(path, "parquet")
  with (
    _convert_errors(path),
    pyarrow.ParquetFile(path, memory_map=True) as file,
  ):
    _check_column(path, column, file.schema_arrow.names)
    # Reads one row group at a time.
    yield from _values(file.iter_batches(_ROWS, columns=[column]))


def _values(batches: Iterable[Any]) -> Iterator[Any]:
  """The values of the single column of pyarrow's batches."""
  for batch in batches:
    yield from batch.column(0).to_pylist()


def _pyarrow(path: pathlib.Path, module: str) -> Any:
  """A module of pyarrow, imported only if a format needs it."""
  try:
    return importlib.import_module(f"pyarrow.{module}")
  except ImportError:
    raise DataError(
      f"{path}: needs pyarrow, which is not installed: pip install pyarrow"
    ) from None


@contextlib.contextmanager
def _convert_errors(path: pathlib.Path) -> Iterator[None]:
  """Converts pyarrow's errors to one-line DataErrors that name the file."""
  error_type = importlib.import_module("pyarrow").ArrowException
  try:
    yield
  except error_type as error:
    raise DataError(f"{path}: {one_line(error)}") from error


_READERS: Mapping[str, Callable[[pathlib.Path, str], Iterable[Any]]] = (
  types.MappingProxyType(
    {".jsonl": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
  )
)
