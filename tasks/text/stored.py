"""A text as ids, in memory if it fits, else memory-mapped on disk."""

from collections.abc import Iterable, Iterator, Sequence
import hashlib
import itertools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from settings import cache
from settings.errors import DataError
from tasks import base, files, tokenizer, vocabularies
from tasks.text import source
from tasks.vocabularies import Vocabulary

_IN_MEMORY = 2**28
"""Largest number of bytes of files that are read into memory."""

_CHUNK = 2**24
"""Number of ids that are processed at a time."""


class Parts(NamedTuple):
  """The training part and the held-out part of a text, as ids.

  Attributes:
    train: the first 90 %.
    validation: the rest.
    characters: number of characters of each id of `validation`; None for a file of
      ids, whose text is unknown.
  """

  train: np.ndarray
  validation: np.ndarray
  characters: np.ndarray | None = None


def boundary(length: int) -> int:
  """The start of the held-out part, as in nanoGPT's `prepare.py`."""
  return int(length * 0.9)


def read(
  config: Any,
  paths: Sequence[pathlib.Path],
  extra: Sequence[str],
  also: str,
  workdir: pathlib.Path | None,
) -> tuple[Vocabulary, Parts]:
  """Reads the vocabulary and the ids of files.

  Args:
    config: a `TextConfig`.
    paths: the files, from `source.find`.
    extra: special tokens of a new vocabulary.
    also: additional text for a new vocabulary.
    workdir: folder of a run, whose vocabulary must be the same.

  Raises:
    DataError: a file is invalid; the message has one line.
  """
  digests = [files.note_file(path) for path in paths]
  if source.has_ids(paths):
    return _read_ids(config, paths, digests, extra, workdir)
  if config.vocabulary == "ids" and not config.tokenizer:
    raise DataError(
      f"task.vocabulary: {paths[0]} has text; expected 'characters', 'bytes' or "
      "'subwords', or a file of ids, .npy or .bin, got 'ids'"
    )
  if sum(path.stat().st_size for path in paths) > _IN_MEMORY:
    return _stream_to_disk(config, paths, digests, extra, also, workdir)
  text = "".join(source.text_blocks(paths, config.column))
  cut = boundary(len(text))
  vocabulary = vocabularies.open_vocabulary(
    config, extra, text + also, text[:cut] + also, workdir
  )
  return vocabulary, Parts(
    vocabulary.encode_text(text[:cut]), *vocabulary.align(text[cut:])
  )


def _read_ids(
  config, paths, digests, extra, workdir
) -> tuple[Vocabulary, Parts]:
  """Reads files of ids, and the vocabulary of these ids."""
  if not config.tokenizer and config.vocabulary != "ids":
    raise DataError(
      f"task.vocabulary: {paths[0]} has ids, whose text is unknown; expected "
      "task.tokenizer=FOLDER of a tokenizer.json, or 'ids' with "
      f"task.vocab_size, got {config.vocabulary!r}"
    )
  if config.column:
    raise DataError(
      f"task.column: {paths[0]} has ids and no columns; expected none, got "
      f"{config.column!r}"
    )
  vocabulary = vocabularies.open_vocabulary(config, extra, "", "", workdir)
  field, count = "task.tokenizer", vocabulary.size
  if not config.tokenizer:
    field, count = "task.vocab_size", config.vocab_size
  arrays = [source.read_ids(path, count) for path in paths]
  for path, ids in zip(paths, arrays, strict=True):
    for start in range(0, len(ids), _CHUNK):
      chunk = ids[start : start + _CHUNK]
      if chunk.min() < 0 or chunk.max() >= count:
        raise DataError(
          f"{path}: expected ids from 0 to {count - 1}, as in {field}, got "
          f"{chunk.min()} to {chunk.max()} of {ids.dtype}"
        )
  ids = arrays[0]
  if len(arrays) > 1:
    dtype, dtypes = _dtype(count), [str(ids.dtype) for ids in arrays]
    # The same bytes are other ids in another format or width. The size of the
    # vocabulary determines the width in the cache.
    suffixes = [files.suffix(path) for path in paths]

    def write(scratch: pathlib.Path) -> pathlib.Path:
      return _write(scratch / "ids", arrays, dtype)

    key = _key("ids", suffixes, dtypes, dtype.__name__, digests)
    cached = cache.folder("texts") / key
    ids = np.memmap(cache.prepare(cached, write), dtype, mode="r")
  cut = boundary(len(ids))
  return vocabulary, Parts(ids[:cut], ids[cut:])


def _stream_to_disk(
  config, paths, digests, extra, also, workdir
) -> tuple[Vocabulary, Parts]:
  """Streams a text once per vocabulary, and stores its ids in the cache."""

  def blocks() -> Iterator[str]:
    return source.text_blocks(paths, config.column)

  def write(scratch: pathlib.Path) -> pathlib.Path:
    folder = scratch / "text"
    folder.mkdir()
    length, characters = 0, {*also}
    for block in blocks():
      length += len(block)
      characters.update(block)
    cut = boundary(length)
    training = itertools.chain(_slice_blocks(blocks(), 0, cut), [also])
    vocabulary = vocabularies.open_vocabulary(
      config, extra, "".join(characters), training, None
    )
    (folder / vocabulary.FILE).write_bytes(vocabulary.content())
    dtype = _dtype(vocabulary.size)
    text = tokenizer.parts(_slice_blocks(blocks(), 0, cut))
    _write(folder / "train", map(vocabulary.encode_text, text), dtype)
    with (
      (folder / "validation").open("wb") as ids,
      (folder / "characters").open("wb") as lengths,
    ):
      for part in tokenizer.parts(_slice_blocks(blocks(), cut, length)):
        aligned = vocabulary.align(part)
        aligned[0].astype(dtype).tofile(ids)
        aligned[1].astype(np.int32).tofile(lengths)
    return folder

  tokenizer_digest = ""
  if config.tokenizer:
    opened = vocabularies.open_file(config.tokenizer, extra)
    tokenizer_digest = hashlib.sha256(opened.content()).hexdigest()
  settings = (
    config.column,
    config.vocabulary,
    config.vocab_size,
    tokenizer_digest,
    extra,
    also,
  )
  # In another format, such as JSON Lines, the same bytes are another text.
  suffixes = [files.suffix(path) for path in paths]
  cached = cache.folder("texts") / _key(*settings, suffixes, digests)
  folder = cache.prepare(cached, write)
  vocabulary = vocabularies.open_file(str(folder), extra)
  base.check_vocabulary(workdir, vocabulary.FILE, vocabulary.content())
  dtype = _dtype(vocabulary.size)
  dtypes = {"train": dtype, "validation": dtype, "characters": np.int32}
  return vocabulary, Parts(
    **{
      name: np.memmap(folder / name, dtype, mode="r")
      for name, dtype in dtypes.items()
    }
  )


def _key(*content: Any) -> str:
  """A name in the cache. Increment the number if the cached content changes."""
  return hashlib.sha256(repr((2, *content)).encode()).hexdigest()[:16]


def _dtype(count: int) -> type[np.integer]:
  """The dtype for ids below `count`."""
  return np.uint16 if count <= 2**16 else np.int32


def _write(
  path: pathlib.Path, parts: Iterable[np.ndarray], dtype: Any
) -> pathlib.Path:
  with path.open("wb") as file:
    for ids in parts:
      for start in range(0, len(ids), _CHUNK):
        ids[start : start + _CHUNK].astype(dtype).tofile(file)
  return path


def _slice_blocks(
  blocks: Iterable[str], start: int, stop: int
) -> Iterator[str]:
  """Yields the characters of a text between two positions."""
  position = 0
  for block in blocks:
    yield block[max(start - position, 0) : max(stop - position, 0)]
    position += len(block)
    if position >= stop:
      return
