"""Stored recordings: a folder, or a dataset of the TFDS catalogue."""

import abc
from collections.abc import Iterator, Sequence
import itertools
import pathlib
from typing import Any, NamedTuple

import numpy as np

from projects.speech import audio, mel
from projects.speech.task_config import FOLDER, TONES, SpeechConfig
from settings.errors import DataError
from tasks import base
from tasks.files import read_lines, typed_path

TRANSCRIPTS = "transcripts.tsv"


class Recording(NamedTuple):
  """One example.

  Attributes:
    samples: [S] float32.
    text: the transcript.
    where: name of the recording, for messages.
  """

  samples: np.ndarray
  text: str
  where: str


class Recordings(abc.ABC):
  """The interface of a source of examples.

  Attributes:
    symbols: symbols of all transcripts; the symbol of id i is at index i − 1.
    max_frames: number of frames of the longest recording.
    max_symbols: number of symbols of the longest transcript.
    held_out: number of held-out examples.
  """

  symbols: str
  max_frames: int
  max_symbols: int
  held_out: int

  @abc.abstractmethod
  def read(
    self, split: str, indices: np.ndarray
  ) -> list[tuple[np.ndarray, Sequence[int]]]:
    """Reads frames [T, M] and symbol ids of the examples with the given numbers."""


class StoredRecordings(Recordings):
  """Recordings in memory; their symbols are sorted by code point."""

  def __init__(
    self,
    train: Sequence[Recording],
    validation: Sequence[Recording],
    config: SpeechConfig,
    seed: int,
  ):
    self._splits = {"train": train, "validation": validation}
    self._config, self._seed = config, seed
    recordings = [*train, *validation]
    self.symbols = "".join(sorted({s for r in recordings for s in r.text}))
    self.max_symbols = max(len(r.text) for r in recordings)
    self.max_frames = max(
      mel.num_frames(len(r.samples), config.sample_rate) for r in recordings
    )
    self.held_out = len(validation)

  def read(
    self, split: str, indices: np.ndarray
  ) -> list[tuple[np.ndarray, Sequence[int]]]:
    """Implements `Recordings.read`."""
    recordings, config = self._splits[split], self._config
    if split == "train":
      indices = base.epoch_order(indices.copy(), len(recordings), self._seed)
    examples = [recordings[int(i)] for i in indices]
    return [
      (
        mel.log_mel(example.samples, config.sample_rate, config.bands),
        [1 + self.symbols.index(symbol) for symbol in example.text],
      )
      for example in examples
    ]


def read(config: SpeechConfig, seed: int) -> StoredRecordings:
  """Reads the recordings of a config.

  Raises:
    DataError: the data are invalid; the message has one line.
  """
  if config.source == FOLDER:
    return _folder(typed_path(config.path), config, seed)
  return _from_catalogue(config, seed)


def _folder(
  folder: pathlib.Path, config: SpeechConfig, seed: int
) -> StoredRecordings:
  """Reads a folder of audio files and a table of transcripts."""
  if not folder.is_dir():
    raise DataError(f"{folder}: no such folder (task.path)")
  table = folder / TRANSCRIPTS
  if not table.is_file():
    raise DataError(
      f"{folder}: no {TRANSCRIPTS}, with a line FILE<tab>TEXT for each recording "
      "(task.path)"
    )
  recordings, seen = [], set()
  for number, line in enumerate(read_lines(table), 1):
    name, tab, text = line.partition("\t")
    where = f"{table}, line {number}"
    if not tab or not name or not text.strip():
      raise DataError(f"{where}: expected FILE<tab>TEXT")
    path = folder / name
    if not path.is_file():
      raise DataError(f"{where}: no such file: {path}")
    # By any spelling or link; otherwise it could be both trained and held out.
    if (file := path.resolve()) in seen:
      raise DataError(f"{where}: {name} appears twice")
    seen.add(file)
    samples = audio.read(path, config.sample_rate, "source")
    recordings.append(_check(Recording(samples, text, str(path)), config))
  return _split(recordings, config, seed, str(table))


def _from_catalogue(config: SpeechConfig, seed: int) -> StoredRecordings:
  """Reads a dataset of the TFDS catalogue.

  The validation split is held out, or else the test split, or else a share of the
  training split.
  """
  from tasks import catalog, tensorflow_free

  library = audio.library("source")
  tensorflow_free.decode_audio_with(
    lambda file: library.read(file, dtype="int16")[0]
  )
  name = config.source
  features = ("audio_feature", "text_feature")
  builder = catalog.prepare(
    name,
    config.path,
    [(field, getattr(config, field)) for field in features],
    instead=f"task.source={TONES} or {FOLDER}",
    field="source",
  )
  feature = builder.info.features
  rate = getattr(feature[config.audio_feature], "sample_rate", None)
  if rate != config.sample_rate:
    raise DataError(
      f"task.source: {name} has {rate} samples per second, expected "
      f"{config.sample_rate} (task.sample_rate)"
    )
  held_out = catalog.held_out_split(builder, name, "source")

  def read_split(split: str) -> list[Recording]:
    return [_check(r, config) for r in _examples(builder, split, config)]

  train = read_split("train")
  if held_out is None:
    return _split(train, config, seed, f"task.source: {name}")
  validation = read_split(held_out)
  if not train or not validation:
    raise DataError(f"task.source: {name} has an empty split")
  return StoredRecordings(train, validation, config, seed)


def _examples(
  builder: Any, split: str, config: SpeechConfig
) -> Iterator[Recording]:
  from tasks import catalog

  label = builder.info.features[config.text_feature]
  for i, example in enumerate(catalog.examples(builder, split)):
    where = f"{builder.info.full_name}, split {split}, recording {i}"
    samples = np.asarray(example[config.audio_feature])
    if samples.ndim != 1:
      raise DataError(
        f"{where}: expected one channel, got shape {samples.shape}"
      )
    if np.issubdtype(samples.dtype, np.integer):
      samples = samples / np.float32(2**15)  # As in 16-bit WAV files.
    text = example[config.text_feature]
    if isinstance(text, bytes):
      text = text.decode()
    elif hasattr(label, "int2str"):
      text = label.int2str(int(text))
    yield Recording(samples.astype(np.float32), str(text), where)


def _check(recording: Recording, config: SpeechConfig) -> Recording:
  """Raises DataError if a transcript is too long for CTC on its recording.

  Each symbol takes one position, as does the blank between two equal symbols.
  """
  text, where = recording.text, recording.where
  if not text.strip():
    raise DataError(f"{where}: empty transcript")
  repeats = sum(a == b for a, b in itertools.pairwise(text))
  needed = len(text) + repeats
  frames = mel.num_frames(len(recording.samples), config.sample_rate)
  if -(-frames // mel.REDUCTION) < needed:
    minimum = (
      needed - 1
    ) * mel.REDUCTION * mel.HOP_SECONDS + mel.WINDOW_SECONDS
    seconds = len(recording.samples) / config.sample_rate
    raise DataError(
      f"{where}: expected at least {minimum:.3f} seconds for the {len(text)} "
      f"symbols of its transcript, got {seconds:.3f}"
    )
  return recording


def _split(
  recordings: list[Recording], config: SpeechConfig, seed: int, where: str
) -> StoredRecordings:
  """Holds out a share, at least one; the choice depends only on the number."""
  if len(recordings) < 2:
    raise DataError(
      f"{where}: expected at least 2 recordings, one to train and one to hold "
      f"out, got {len(recordings)}"
    )
  order = np.random.default_rng(0).permutation(len(recordings))
  count = max(1, round(config.held_out * len(recordings)))
  count = min(count, len(recordings) - 1)
  validation, train = np.sort(order[:count]), np.sort(order[count:])
  return StoredRecordings(
    [recordings[i] for i in train],
    [recordings[i] for i in validation],
    config,
    seed,
  )
