"""The samples of one audio file.

soundfile reads them; it is imported where it is needed.
"""

import io
import pathlib
from typing import Any

import numpy as np

from settings.errors import DataError
from tasks.files import read_bytes


def library(field: str) -> Any:
  """The module soundfile.

  Args:
    field: the config field that asks for files, for the message.

  Raises:
    DataError: it is not installed, or its library of the system is missing.
  """
  try:
    import soundfile
  except (ImportError, OSError) as error:
    raise DataError(
      f"task.{field}: recordings are read with soundfile, which cannot be "
      f"imported ({error}): pip install soundfile"
    ) from error
  return soundfile


def decode(data: bytes, where: str, sample_rate: int, field: str) -> np.ndarray:
  """Reads a recording of one channel.

  Args:
    data: of a file that libsndfile knows: WAV, FLAC, OGG and others.
    where: names it, for messages.
    sample_rate: that it has to have.
    field: the config field that asks for it.

  Returns:
    [S] float32, integers scaled to [−1, 1].

  Raises:
    DataError: not a recording, of another rate, of several channels, or with
      samples that are not finite.
  """
  soundfile = library(field)
  try:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
  except Exception as error:  # libsndfile's own, and those of damaged files.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raise DataError(f"{where}: cannot be read as audio ({lines[0]})") from error
  if rate != sample_rate:
    raise DataError(
      f"{where}: expected {sample_rate} samples a second (task.sample_rate), got "
      f"{rate}"
    )
  if samples.ndim != 1:
    raise DataError(
      f"{where}: expected one channel, got {samples.shape[1]}; mix them into one"
    )
  if not np.isfinite(samples).all():
    raise DataError(f"{where}: expected finite samples, got NaN or infinity")
  return samples


def read(path: pathlib.Path, sample_rate: int, field: str) -> np.ndarray:
  """As `decode`, of a file."""
  library(field)  # Without it, no file needs to be there.
  return decode(read_bytes(path), str(path), sample_rate, field)
