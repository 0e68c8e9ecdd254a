"""Character-level language modelling of one text file, with nanoGPT's split."""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
from typing import Any

import numpy as np

from settings.checks import check
from tasks import base
from tasks.base import BOS, EOS, PAD, Batch, DataError, DecodeBatch
from tasks.files import read_text, typed_path
from tasks.sizes import check_sizes

VOCABULARY_FILE = "characters.json"
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_NUM_SAMPLES = 4
_PRINTABLE = {"\n": "⏎", " ": "␣", "\t": "⇥"}


@dataclasses.dataclass(frozen=True)
class TextConfig:
  """Which text, in pieces of which length.

  Attributes:
    path: a UTF-8 file; its first 90 % are trained, the rest is held out.
    context: characters of one example, T.
    eval_batches: batches of one evaluation; 0 takes the whole held-out text.
  """

  path: str = ""
  context: int = 256
  eval_batches: int = 0

  def __post_init__(self):
    check(self, "path", bool(self.path), "a text file")
    check(self, "context", self.context >= 2, "at least 2 characters")
    check(self, "eval_batches", self.eval_batches >= 0, "0 or more")


class TextTask:
  """Windows of a text, each character predicted from those before it.

  Ids 0 to 2 are PAD, BOS and EOS as in every task. No text contains them, so
  they are never targets and only pad the last held-out window; a text has no
  end, and generation runs to its full length.

  `text` is None for a restored task, which encodes and decodes only.
  """

  source_vocab_size: int | None = None
  shared_vocabulary = False
  max_source_length: int | None = None
  pad_id, bos_id, eos_id = PAD, BOS, EOS
  eval_splits: tuple[str, ...]

  def __init__(
    self,
    config: TextConfig,
    characters: Sequence[str],
    text: str | None,
    *,
    batch_size: int,
    seed: int,
  ):
    self._config = config
    self._batch_size = batch_size
    self._seed = seed
    self._symbols = [*_SPECIAL, *characters]
    self._ids = {c: len(_SPECIAL) + i for i, c in enumerate(characters)}
    self.target_vocab_size = len(self._symbols)
    self.max_target_length = config.context
    self.eval_splits = ("validation",) if text is not None else ()
    if text is not None:
      ids = self._encode_text(text)
      self._train, self._validation = np.split(ids, [_boundary(text)])

  def train_batch(self, step: int) -> Batch:
    """B windows from random places, drawn from (seed, step)."""
    context = self._config.context
    rng = np.random.default_rng((self._seed, step))
    starts = rng.integers(len(self._train) - context, size=self._batch_size)
    windows = self._train[starts[:, None] + np.arange(context + 1)]
    return _batch(windows, np.full(self._batch_size, context))

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """The held-out text in order, each character predicted exactly once."""
    context, text = self._config.context, self._held_out(split)
    starts = np.arange(0, len(text) - 1, context)
    padded = np.pad(text, (0, context))
    counts = np.minimum(len(text) - 1 - starts, context)
    firsts = range(0, len(starts), self._batch_size)
    for first in firsts[: self._config.eval_batches or None]:
      chosen = slice(first, first + self._batch_size)
      windows = padded[starts[chosen, None] + np.arange(context + 1)]
      yield base.pad_rows(_batch(windows, counts[chosen]), self._batch_size)

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """A few places to continue from; the references are how it went on."""
    context, text = self._config.context, self._held_out(split)
    half = context // 2
    places = (len(text) - context) // _NUM_SAMPLES
    count = min(_NUM_SAMPLES, self._batch_size)
    if places < 1:
      return
    starts = np.arange(count) * places
    rows = text[starts[:, None] + np.arange(context)]
    prompt = rows[base.repeat_rows(count, self._batch_size), :half]
    inputs = {
      "prompt": prompt,
      "prompt_length": np.full(self._batch_size, half, np.int32),
    }
    references = [self.decode(row[half:]) for row in rows]
    yield DecodeBatch(inputs, references, context - half)

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Token accuracy."""
    accuracy = base.token_accuracy(logits, batch["targets"], batch["weights"])
    return {"token_accuracy": accuracy}

  def summarize(
    self, sums: Mapping[str, tuple[float, float]]
  ) -> dict[str, float]:
    """Divides once; bits per character are the loss over ln 2."""
    metrics = base.divide(sums)
    if "loss" in metrics:
      metrics["bits_per_character"] = metrics["loss"] / math.log(2)
    return metrics

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """Nothing: a text can go on in more ways than the one it took."""
    del hypotheses, references
    return {}

  def encode(self, line: str) -> list[int]:
    """Prompt ids; an empty line begins after a line end, as a text does."""
    prompt = line or "\n"
    if len(prompt) > self._config.context:
      raise ValueError(
        f"{len(prompt)} characters, more than the model reads (task.context="
        f"{self._config.context})"
      )
    return self.encode_target(prompt)

  def encode_target(self, line: str) -> list[int]:
    """Ids of characters; a text goes on, so none marks an end."""
    for character in line:
      if character not in self._ids:
        raise ValueError(f"{character!r} does not occur in the training text")
    return [self._ids[character] for character in line]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Characters of ids, up to EOS."""
    return "".join(self._symbols[i] for i in base.until_eos(ids))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The character of each id, spaces and line ends made visible."""
    symbols = [self._symbols[int(i)] for i in ids]
    return [_PRINTABLE.get(symbol, symbol) for symbol in symbols]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the characters in the order of their ids."""
    content = _dump(self._symbols[len(_SPECIAL) :])
    base.save_vocabulary(directory, {VOCABULARY_FILE: content})

  def _encode_text(self, text: str) -> np.ndarray:
    # `characters` are sorted by code point, so this is `self._ids`, at once.
    known = [ord(character) for character in self._ids]
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    ids = np.searchsorted(known, codes) + len(_SPECIAL)
    return ids.astype(np.int32)

  def _held_out(self, split: str) -> np.ndarray:
    if split not in self.eval_splits:
      raise KeyError(split)
    return self._validation


def make(
  config: TextConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> TextTask:
  """Makes the task: reads the file and its characters.

  Args:
    config: which text.
    kind: `model.kind`; 'decoder' only.
    batch_size: rows of every batch.
    seed: of the places of training windows.
    workdir: of a run; its characters must be the file's.
    restore: take the run's characters and read no text.

  Raises:
    ValueError: a kind of model that this task cannot feed.
    DataError: a missing, undecodable, empty or too short text.
  """
  base.layout("text", kind, ("decoder",))
  check_sizes(batch_size, lengths={"context": config.context})
  if restore:
    characters = json.loads(base.load_vocabulary(workdir, VOCABULARY_FILE))
    return TextTask(config, characters, None, batch_size=batch_size, seed=seed)
  path = typed_path(config.path)
  if not path.is_file():
    raise DataError(f"{path}: no such file (task.path)")
  text = read_text(path)
  if not text:
    raise DataError(f"{path}: the file is empty")
  if _boundary(text) <= config.context:
    raise DataError(
      f"{path}: {len(text)} characters, of which 90 % are trained, are too few "
      f"for task.context={config.context}"
    )
  if len(text) - _boundary(text) < 2:
    raise DataError(
      f"{path}: empty validation split: its last 10 % are "
      f"{len(text) - _boundary(text)} characters"
    )
  characters = sorted(set(text))
  base.check_vocabulary(workdir, VOCABULARY_FILE, _dump(characters))
  return TextTask(config, characters, text, batch_size=batch_size, seed=seed)


def _boundary(text: str) -> int:
  """Where nanoGPT's `prepare.py` cuts: int(n · 0.9)."""
  return int(len(text) * 0.9)


def _batch(windows: np.ndarray, counts: np.ndarray) -> Batch:
  """Windows [B, T + 1] of which the first `counts` + 1 columns are text."""
  inside = np.arange(windows.shape[1] - 1) < counts[:, None]
  return {
    "inputs": windows[:, :-1] * inside,
    "targets": windows[:, 1:] * inside,
    "weights": inside.astype(np.float32),
  }


def _dump(characters: Sequence[str]) -> bytes:
  return json.dumps(list(characters), ensure_ascii=False, indent=0).encode()
