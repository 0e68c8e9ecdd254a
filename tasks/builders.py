"""TFDS builders, written as array_record and read back without TensorFlow.

This module imports TFDS (0.7 s), so it is imported where it is needed.
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import io
import pathlib
import tempfile
from typing import Any

import tensorflow_datasets as tfds

from tasks import cache
from tasks.base import DataError
from tasks.files import Pairs


class AlignedText(tfds.core.GeneratorBasedBuilder):
  """Sentence pairs that are already in memory, in the order given."""

  VERSION = tfds.core.Version("1.0.0")

  def __init__(
    self,
    *,
    languages: tuple[str, str],
    pairs: Mapping[str, Pairs],
    **options: Any,
  ):
    # `_info` is called by the constructor of the base class.
    self._languages = languages
    self._pairs = pairs
    super().__init__(**options)

  def _info(self) -> tfds.core.DatasetInfo:
    return tfds.core.DatasetInfo(
      builder=self,
      features=tfds.features.Translation(self._languages),
      disable_shuffling=True,
    )

  def _split_generators(self, dl_manager: Any) -> dict[str, Iterator]:
    del dl_manager
    return {
      name: self._generate_examples(pairs)
      for name, pairs in self._pairs.items()
    }

  def _generate_examples(
    self, pairs: Pairs
  ) -> Iterator[tuple[int, dict[str, str]]]:
    for i, pair in enumerate(pairs):
      yield i, dict(zip(self._languages, pair, strict=True))


def prepare_pairs(
  key: str, languages: tuple[str, str], read: Callable[[], Mapping[str, Pairs]]
) -> tfds.core.DatasetBuilder:
  """Prepares pairs under `key`, or finds what was prepared before.

  Args:
    key: names the content, so that changed content is prepared again.
    languages: of the two sides of a pair.
    read: split → pairs; called only where nothing is prepared.
  """

  def write(scratch: str) -> pathlib.Path:
    pairs = read()
    builder = AlignedText(
      languages=languages,
      pairs=pairs,
      data_dir=scratch,
      file_format="array_record",
    )
    with _quiet():
      builder.download_and_prepare()
    return pathlib.Path(builder.data_dir)

  return tfds.builder_from_directory(prepare(key, write))


def prepare(key: str, write: Callable[[str], pathlib.Path]) -> pathlib.Path:
  """The folder `key` of the cache, written once and whole.

  A folder appears under its name by one rename of a finished one, as with TFDS. So
  a killed preparation leaves nothing that could be taken for data. Of two processes
  that prepare at once the later keeps what the earlier made, where TFDS fails.

  Args:
    key: name in the cache.
    write: given a scratch folder, prepares and returns a folder inside it.
  """
  final = cache.folder("datasets") / key
  if final.exists():
    return final
  try:
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
      dir=final.parent, prefix=".preparing-"
    ) as scratch:
      finished = write(scratch)
      try:
        finished.rename(final)
      except OSError:
        if not final.exists():
          raise
  except OSError as error:
    raise DataError(
      f"{final}: {error.strerror or error} (prepared data; "
      f"{cache.VARIABLE} names another folder)"
    ) from error
  return final


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Silences progress bars and prints, for preparations of a few seconds."""
  tfds.display_progress_bar(False)
  try:
    with contextlib.redirect_stdout(io.StringIO()):
      yield
  finally:
    tfds.display_progress_bar(True)
