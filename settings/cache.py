"""The folder of everything that is kept between runs.

Compiled programs, prepared data sets, vocabularies and matplotlib's list of
fonts. Nothing else is written outside the folder of a run.
"""

from collections.abc import Callable
import os
import pathlib
import tempfile

from settings.errors import DataError

VARIABLE = "ATTENTION_LAB_CACHE"
"""Environment variable that names the folder; `~/.cache/attention-lab` if not."""


def folder(kind: str) -> pathlib.Path:
  """The folder of one kind of cached data; creates nothing.

  Args:
    kind: 'xla', 'datasets', …: a folder inside that of all.
  """
  root = os.environ.get(VARIABLE) or "~/.cache/attention-lab"
  return pathlib.Path(root).expanduser().absolute() / kind


def prepare(
  path: pathlib.Path, write: Callable[[pathlib.Path], pathlib.Path]
) -> pathlib.Path:
  """Writes a file or a folder of the cache once and atomically.

  It appears under its name by one rename of a finished one. So a killed
  preparation leaves nothing that could be taken for data. Of two processes that
  prepare at once the later keeps what the earlier made.

  Args:
    path: in the cache.
    write: given a scratch folder, makes and returns something inside it.

  Returns:
    `path`.

  Raises:
    DataError: the cache cannot be written.
  """
  if path.exists():
    return path
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      dir=path.parent, prefix=".preparing-"
    ) as scratch:
      finished = write(pathlib.Path(scratch))
      try:
        finished.rename(path)
      except OSError:
        if not path.exists():
          raise
  except OSError as error:
    raise DataError(
      f"{path}: {error.strerror or error} (prepared data; "
      f"{VARIABLE} names another folder)"
    ) from error
  return path
