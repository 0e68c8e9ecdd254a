"""Recordings in batches, and the error rate of symbols."""

from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from projects.speech import audio, ctc, mel, sources, tones
from projects.speech.sources import Recordings
from projects.speech.task_config import TONES, SpeechConfig
from settings import json_text
from tasks import base, draws
from tasks.base import Batch, DataError
from tasks.files import typed_path

_SYMBOLS_FILE = "speech.json"


class DialledRecordings(Recordings):
  """Strings of digits, dialled as tones."""

  symbols = tones.DIGITS

  def __init__(self, config: SpeechConfig, seed: int):
    self._config, self._seed = config, seed
    samples = tones.longest(config.max_digits, config.sample_rate)
    self.max_frames = mel.num_frames(samples, config.sample_rate)
    self.max_symbols = config.max_digits
    self.held_out = config.eval_size

  def read(
    self, split: str, indices: np.ndarray
  ) -> list[tuple[np.ndarray, Sequence[int]]]:
    """Implements `Recordings.read`."""
    config = self._config
    dialled = tones.dial(
      draws.split_key(self._seed, split),
      indices,
      min_digits=config.min_digits,
      max_digits=config.max_digits,
      sample_rate=config.sample_rate,
      snr=config.snr,
    )
    return [
      (
        mel.log_mel(samples[:end], config.sample_rate, config.bands),
        [int(digit) + 1 for digit in digits if digit >= 0],
      )
      for samples, end, digits in zip(*dialled, strict=True)
    ]


class SpeechTask(base.Task):
  """Recordings as log-mel frames, with their transcripts, for CTC.

  A batch has 'frames' [B, S, M] float32, 'source_mask' [B, S] bool, 'targets'
  [B, U] int32, ids from 1, and 'weights' [B, U] float32. Id 0 is the blank.

  Attributes:
    symbols: the symbol of id i is at index i − 1.
    input_shapes: {'frames': (S, M)}.
  """

  pad_id = ctc.BLANK

  def __init__(
    self,
    config: SpeechConfig,
    symbols: str,
    shape: tuple[int, int],
    recordings: Recordings | None,
    *,
    batch_size: int,
  ):
    """Creates the task; `shape` is (S, U), `recordings` is None for a restored task."""
    self._config = config
    self._recordings = recordings
    self._batch_size = batch_size
    self.symbols = symbols
    self.input_shapes = {"frames": (shape[0], config.bands)}
    self.max_target_length = shape[1]
    self.target_vocab_size = 1 + len(symbols)
    self.eval_splits = () if recordings is None else ("validation",)

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """Examples step · B … (step + 1) · B − 1."""
    assert self._recordings is not None, "a restored task has no data"
    indices = base.indices(step, self._batch_size, rows)
    return self._batch(self._recordings.read("train", indices))

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields every held-out recording once, in order."""
    if split not in self.eval_splits or self._recordings is None:
      raise KeyError(split)
    for indices in base.chunks(self._recordings.held_out, self._batch_size):
      batch = self._batch(self._recordings.read(split, indices))
      yield base.pad_rows(batch, self._batch_size)

  def loss(
    self, logits: Any, batch: Mapping[str, Any], label_smoothing: float
  ) -> tuple[Any, Any, Any]:
    """Computes the CTC loss: objective, nats, and the number of symbols."""
    del label_smoothing  # The config does not allow it.
    mask = ctc.subsample_mask(batch["source_mask"], logits.shape[1])
    nats, count = ctc.loss(logits, mask, batch["targets"], batch["weights"])
    return nats, nats, count

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Sums for the error rate: edits of the greedy output over transcript symbols."""
    mask = ctc.subsample_mask(batch["source_mask"], logits.shape[1])
    targets, weights = batch["targets"], batch["weights"]
    edits = ctc.edit_distance(ctc.greedy(logits, mask), targets, weights)
    has_any = jnp.any(weights > 0, axis=1)
    edits = jnp.sum(jnp.where(has_any, edits, 0)).astype(jnp.float32)
    return {"error_rate": jnp.stack([edits, jnp.sum(weights)])}

  def summarize(
    self, sums: Mapping[str, tuple[float, float]], split: str | None = None
  ) -> dict[str, float]:
    """Divides sums by counts; the error rate comes first."""
    del split
    values = base.divide(sums)
    first = {"error_rate": values.pop("error_rate", 0.0)} if values else {}
    return first | values

  def read(self, path: str) -> Batch:
    """Reads a recording as a batch of one.

    Raises:
      DataError: the file does not exist, is not a recording with this task's sample
        rate, or is longer than the recordings of this task.
    """
    file, config = typed_path(path), self._config
    if not file.is_file():
      raise DataError(f"{file}: no such file")
    samples = audio.read(file, config.sample_rate, "source")
    length, bands = self.input_shapes["frames"]
    num_frames = mel.num_frames(len(samples), config.sample_rate)
    if not 1 <= num_frames <= length:
      raise DataError(
        f"{file}: expected 1 to {length} frames of 10 ms, as in the recordings "
        f"of this run, got {num_frames}"
      )
    frames = np.zeros((1, length, bands), np.float32)
    frames[0, :num_frames] = mel.log_mel(samples, config.sample_rate, bands)
    return {
      "frames": frames,
      "source_mask": np.arange(length)[None] < num_frames,
    }

  def encode(self, line: str) -> NoReturn:
    """Raises ValueError, because a line of text is not a recording."""
    raise ValueError(
      f"expected a recording, got the text {line!r}; "
      "training.commands.draw_attention reads one with --audio=FILE"
    )

  def encode_target(self, line: str) -> list[int]:
    """Ids of the symbols of a line."""
    for symbol in line:
      if symbol not in self.symbols:
        raise ValueError(
          f"expected symbols of {self.symbols!r}, got {symbol!r}"
        )
    return [1 + self.symbols.index(symbol) for symbol in line]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """The symbols of ids, without blanks."""
    return ctc.text(np.asarray(ids), self.symbols)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The symbol of each id; '∅' is the blank."""
    return [self.symbols[int(i) - 1] if i else "∅" for i in ids]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the symbols, and the sizes of a batch."""
    base.save_vocabulary(directory, {_SYMBOLS_FILE: self._sizes()})

  def check_run(self, workdir: pathlib.Path | None) -> None:
    """Raises DataError if a run has other symbols or sizes."""
    base.check_vocabulary(workdir, _SYMBOLS_FILE, self._sizes())

  def _sizes(self) -> bytes:
    shape = self.input_shapes["frames"][0], self.max_target_length
    return json.dumps({"symbols": self.symbols, "shape": shape}).encode()

  def _batch(
    self, examples: Sequence[tuple[np.ndarray, Sequence[int]]]
  ) -> Batch:
    """Concatenates examples, padded at the end."""
    count, (length, bands) = len(examples), self.input_shapes["frames"]
    frames = np.zeros((count, length, bands), np.float32)
    mask = np.zeros((count, length), bool)
    targets = np.zeros((count, self.max_target_length), np.int32)
    weights = np.zeros(targets.shape, np.float32)
    for row, (example, ids) in enumerate(examples):
      frames[row, : len(example)] = example
      mask[row, : len(example)] = True
      targets[row, : len(ids)] = ids
      weights[row, : len(ids)] = 1
    return {
      "frames": frames,
      "source_mask": mask,
      "targets": targets,
      "weights": weights,
    }


def make(
  config: SpeechConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> SpeechTask:
  """Reads or computes recordings; see `TaskEntry`."""
  base.layout("speech", kind, ("encoder",))
  recordings: Recordings | None = None
  if restore:
    vocabulary = json_text.loads(base.load_vocabulary(workdir, _SYMBOLS_FILE))
    symbols, (length, num_targets) = vocabulary["symbols"], vocabulary["shape"]
  else:
    recordings = _recordings(config, seed)
    symbols, num_targets = recordings.symbols, recordings.max_symbols
    # A multiple, so that `ctc.subsample_mask` finds the frame of each position.
    length = -(-recordings.max_frames // mel.REDUCTION) * mel.REDUCTION
  task = SpeechTask(
    config, symbols, (length, num_targets), recordings, batch_size=batch_size
  )
  if not restore:
    task.check_run(workdir)
  return task


def _recordings(config: SpeechConfig, seed: int) -> Recordings:
  if config.source == TONES:
    return DialledRecordings(config, seed)
  return sources.read(config, seed)
