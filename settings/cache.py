"""The cache folder, which all runs share.

It has compiled programs, prepared data sets, vocabularies and matplotlib's list of
fonts. Runs write nothing else outside their workdir.
"""

from collections.abc import Callable
import os
import pathlib
import tempfile

from settings.errors import DataError

VARIABLE = "ATTENTION_LAB_CACHE"
"""Environment variable with the folder; the default is `~/.cache/attention-lab`."""


def folder(kind: str) -> pathlib.Path:
  """Returns the folder of one kind of cached data; does not create it.

  Args:
    kind: the name of a subfolder, such as 'xla' or 'datasets'.
  """
  root = os.environ.get(VARIABLE) or "~/.cache/attention-lab"
  return pathlib.Path(root).expanduser().absolute() / kind


def prepare(
  path: pathlib.Path, write: Callable[[pathlib.Path], pathlib.Path]
) -> pathlib.Path:
  """Writes a file or a folder of the cache once and atomically.

  A finished file is renamed to its final name, so a killed process never leaves partial
  data there. If two processes prepare the same data, the first to finish wins.

  Args:
    path: the file or folder, in the cache.
    write: gets a scratch folder, creates the file or folder inside it and returns it.

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
      f"{VARIABLE} sets another folder)"
    ) from error
  return path
