"""Reads the samples of an audio file with soundfile, which is imported late."""

import io
import pathlib
from typing import Any

import numpy as np

from settings.errors import DataError
from tasks.files import read_bytes


def library(field: str) -> Any:
  """Imports soundfile.

  Args:
    field: the config field that needs audio files, for the message.

  Raises:
    DataError: soundfile is not installed, or its system library is missing.
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
    data: content of a file that libsndfile supports: WAV, FLAC, OGG and others.
    where: name of the recording, for messages.
    sample_rate: the required sample rate.
    field: the config field that needs audio files, for messages.

  Returns:
    [S] float32; integers are scaled to [−1, 1].

  Raises:
    DataError: the file is not a recording, or has another sample rate, several
      channels, or samples that are not finite.
  """
  soundfile = library(field)
  try:
    samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
  except Exception as error:  # Damaged files raise errors of several types.
    lines = str(error).strip().splitlines() or [type(error).__name__]
    raise DataError(f"{where}: cannot be read as audio ({lines[0]})") from error
  if rate != sample_rate:
    raise DataError(
      f"{where}: expected {sample_rate} samples per second (task.sample_rate), got "
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
  """Like `decode`, for a file."""
  library(field)  # Reports a missing library before a missing file.
  return decode(read_bytes(path), str(path), sample_rate, field)
