"""Copying, reversing and duplicating random sequences: is anything learnt?

Sequences are computed from (seed, split, index) with a counter-based generator
(Philox; Salmon et al. 2011) and never stored.
"""

from collections.abc import Iterator, Mapping, Sequence
import json
import pathlib
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge
import numpy as np
from pydantic.dataclasses import dataclass

from settings.checks import check
from settings.fields import STRICT, Count
from tasks import base, draws
from tasks.base import BOS, EOS, PAD, Batch, DecodeBatch
from tasks.generated import check_eval_lengths
from tasks.sizes import check_sizes

SEP = 3
FIRST_SYMBOL = 4
_SPLITS = ("train", "validation")


@dataclass(frozen=True, config=STRICT)
class CopyConfig:
  """Which sequences, and what is to be done with them.

  Attributes:
    kind: 'copy' gives w back, 'reverse' gives it back to front, 'duplicate' is
      the `0w0w` of Kitaev et al. (2020), for decoders only: a separator before
      each w, and the loss on the second half. Its length is
      2 · max_length + 2, so 511 symbols give the 1024 of the paper.
    vocab_size: distinct symbols, written 0 … vocab_size − 1.
    min_length: shortest w; equal to `max_length` for one fixed length.
    max_length: longest w, in symbols.
    eval_lengths: lengths of w below `min_length` or above `max_length`; each is
      a split such as 'length_32', after 'validation', whose w all have that
      length. These splits are scored by teacher forcing alone, where
      'sequence_accuracy' is the exact match.
    eval_size: held-out sequences of each split.
  """

  solved_at: ClassVar[float] = 0.95

  kind: Literal["copy", "reverse", "duplicate"] = "copy"
  vocab_size: Annotated[int, Ge(2)] = 32
  min_length: Count = 1
  max_length: Count = 16
  eval_lengths: tuple[int, ...] = ()
  eval_size: Count = 1000

  def __post_init__(self):
    check(
      self,
      "min_length",
      1 <= self.min_length <= self.max_length,
      f"1 to max_length={self.max_length}",
    )
    check_eval_lengths(self, 1, low="min_length", high="max_length")


class CopyTask:
  """Sequences to copy, laid out for one kind of model.

  encoder_decoder: source = w EOS, targets = w' EOS, inputs = BOS w'.
  decoder: one stream `w SEP w' EOS` (duplicate: `SEP w SEP w EOS`), shifted by
    one, with weights on w' EOS only.
  encoder: source = w, targets = w', position by position.
  """

  source_vocab_size: int | None
  max_source_length: int | None
  pad_id, bos_id, eos_id = PAD, BOS, EOS
  eval_splits: tuple[str, ...]
  baselines = base.NO_BASELINES

  def __init__(
    self, config: CopyConfig, *, kind: str, batch_size: int, seed: int
  ):
    served = ("encoder_decoder", "decoder", "encoder")
    if config.kind == "duplicate":
      served = ("decoder",)
    kind = base.layout(f"task.kind={config.kind!r}", kind, served)
    self._config = config
    self._kind = kind
    self._batch_size = batch_size
    self._seed = seed
    size = FIRST_SYMBOL + config.vocab_size
    self.source_vocab_size = None if kind == "decoder" else size
    self.target_vocab_size = size
    self.shared_vocabulary = kind != "decoder"
    # Split -> the shortest and the longest w.
    trained = config.min_length, config.max_length
    self._lengths = dict.fromkeys(_SPLITS, trained) | {
      f"length_{length}": (length, length) for length in config.eval_lengths
    }
    self.eval_splits = tuple(s for s in self._lengths if s != "train")
    lengths = {
      "max_length": self._target_length(config.max_length),
      "eval_lengths": self._target_length(max(config.eval_lengths, default=0)),
    }
    self.max_target_length = max(lengths.values())
    self.max_source_length = (
      None if kind == "decoder" else self.max_target_length
    )
    check_sizes(
      batch_size,
      lengths=lengths,
      symbols={"vocab_size": size},
      examples={"eval_size": config.eval_size},
    )

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The batch of a step: sequences step · B … (step + 1) · B − 1."""
    batch = self._batch(*self._rows("train", step * self._batch_size))
    return base.only(batch, rows)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """The held-out sequences in their order."""
    for words, lengths in self._held_out(split):
      yield base.pad_rows(self._batch(words, lengths), self._batch_size)

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """The held-out sequences to be generated.

    None for an encoder, and none at other lengths than the trained ones.
    """
    if self._kind == "encoder" or split not in _SPLITS:
      return
    for words, lengths in self._held_out(split):
      answers, _ = self._answers(words, lengths)
      rows = base.repeat_rows(len(words), self._batch_size)
      words, lengths = words[rows], lengths[rows]
      if self._kind == "decoder":
        prompt = self._prompts(words, lengths)
        inputs = {
          "prompt": prompt,
          "prompt_length": self._prompt_length(lengths).astype(np.int32),
        }
      else:
        inputs = {"source": _append(words, lengths, EOS)}
      yield DecodeBatch(
        inputs, [self.decode(row) for row in answers], answers.shape[1]
      )

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Token accuracy, and accuracy of whole sequences."""
    arguments = (logits, batch["targets"], batch["weights"])
    return {
      "token_accuracy": base.token_accuracy(*arguments),
      "sequence_accuracy": base.sequence_accuracy(*arguments),
    }

  def summarize(
    self, sums: Mapping[str, tuple[float, float]]
  ) -> dict[str, float]:
    """Divides once."""
    return base.divide(sums)

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """Share of sequences that came out exactly."""
    pairs = list(zip(hypotheses, references, strict=True))
    if not pairs:
      return {}
    return {"exact_match": sum(h == r for h, r in pairs) / len(pairs)}

  def encode(self, line: str) -> list[int]:
    """Ids of symbols between spaces, such as "3 17 5"."""
    ids = self._symbol_ids(line)
    words, lengths = np.array([ids], np.int32), np.array([len(ids)])
    if self._kind == "decoder":
      words = self._prompts(words, lengths)
    elif self._kind == "encoder_decoder":
      words = _append(words, lengths, EOS)
    return words[0].tolist()

  def encode_target(self, line: str) -> list[int]:
    """Ids of an answer, typed like a source, and EOS."""
    return [*self._symbol_ids(line), EOS]

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Symbols between spaces, up to EOS."""
    return " ".join(self.labels(base.until_eos(ids)))

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The symbol of each id."""
    special = ("<pad>", "<bos>", "<eos>", "|")
    return [
      special[i] if i < FIRST_SYMBOL else str(i - FIRST_SYMBOL)
      for i in (int(i) for i in ids)
    ]

  def save(self, directory: pathlib.Path) -> None:
    """Writes the list of symbols; it follows from the config."""
    symbols = self.labels(range(self.target_vocab_size))
    content = json.dumps(symbols).encode()
    base.save_vocabulary(directory, {"symbols.json": content})

  def _symbol_ids(self, line: str) -> list[int]:
    symbols = line.split()
    config = self._config
    leaf, longest = "max_length", config.max_length
    if max(config.eval_lengths, default=0) > longest:
      leaf, longest = "eval_lengths", max(config.eval_lengths)
    if not 1 <= len(symbols) <= longest:
      raise ValueError(
        f"expected 1 to {longest} symbols (task.{leaf}), got {len(symbols)}"
      )
    known = {str(i): FIRST_SYMBOL + i for i in range(config.vocab_size)}
    for symbol in symbols:
      if symbol not in known:
        raise ValueError(
          f"expected symbols 0 to {config.vocab_size - 1}, got {symbol!r}"
        )
    return [known[symbol] for symbol in symbols]

  def _held_out(self, split: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, self._config.eval_size, self._batch_size):
      words, lengths = self._rows(split, start)
      count = min(self._batch_size, self._config.eval_size - start)
      yield words[:count], lengths[:count]

  def _rows(self, split: str, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Sequences start … start + B − 1 of a split: ids [B, L], lengths [B].

    Held out are the sequences whose weighted sum of symbols is 0 modulo the
    number of symbols: one in `vocab_size`, so no sequence is both trained and
    held out, however small the space (in a tiny one the held-out sequences
    repeat). The first symbol is chosen to make the sum come out; it stays
    uniform.
    """
    shortest, length = self._lengths[split]
    size = np.uint64(self._config.vocab_size)
    # Philox gives four words a count, so each row begins at a count of its own:
    # one random jump serves the whole batch, and a row depends on its index
    # alone, not on the batch size.
    counts = -(-(length + 2) // 4)
    philox = np.random.Philox(key=self._key(split))
    philox.advance(start * counts)
    raw = philox.random_raw(self._batch_size * counts * 4)
    raw = raw.reshape(self._batch_size, -1)
    span = np.uint64(length - shortest + 1)
    lengths = (raw[:, 0] % span).astype(np.int64) + shortest
    symbols = raw[:, 2 : length + 2] % size
    symbols *= np.arange(length) < lengths[:, None]
    remainder = np.zeros(self._batch_size, np.uint64)
    if split == "train":
      remainder = np.uint64(1) + raw[:, 1] % (size - np.uint64(1))
    others = (symbols[:, 1:] * _sum_weights(length)[1:]).sum(axis=1) % size
    symbols[:, 0] = (remainder + size - others) % size
    ids = symbols.astype(np.int32) + FIRST_SYMBOL
    return np.where(np.arange(length) < lengths[:, None], ids, PAD), lengths

  def _key(self, split: str) -> np.ndarray:
    """The generator's key [2] of a split; two splits share no number."""
    if split not in _SPLITS:
      return draws.split_key(self._seed, split)
    # These two are keyed by their number, so that a seed keeps the sequences
    # that it always had.
    sequence = np.random.SeedSequence((self._seed, _SPLITS.index(split)))
    return sequence.generate_state(2, np.uint64)

  def _batch(self, words: np.ndarray, lengths: np.ndarray) -> Batch:
    answers, answer_lengths = self._answers(words, lengths)
    if self._kind == "encoder":
      weights = np.arange(words.shape[1]) < lengths[:, None]
      batch = {"source": words, "targets": answers}
    elif self._kind == "encoder_decoder":
      weights = np.arange(answers.shape[1]) < answer_lengths[:, None]
      batch = {
        "source": _append(words, lengths, EOS),
        "inputs": np.pad(answers[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
        * weights,
        "targets": answers,
      }
    else:
      prompts = self._prompts(words, lengths)
      starts = self._prompt_length(lengths)
      stream = np.pad(prompts, ((0, 0), (0, answers.shape[1])))
      columns = starts[:, None] + np.arange(answers.shape[1])
      np.put_along_axis(stream, columns, answers, axis=1)
      targets = stream[:, 1:]
      positions = np.arange(1, stream.shape[1])
      weights = (positions >= starts[:, None]) & (targets != PAD)
      # What follows the last weighted target is padding, EOS among it.
      batch = {"inputs": stream[:, :-1] * (targets != PAD), "targets": targets}
    batch = {name: array.astype(np.int32) for name, array in batch.items()}
    return batch | {"weights": weights.astype(np.float32)}

  def _answers(
    self, words: np.ndarray, lengths: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    """What is to be produced, with EOS where a decoder produces it."""
    if self._config.kind == "reverse":
      columns = lengths[:, None] - 1 - np.arange(words.shape[1])
      reversed_ = np.take_along_axis(words, np.maximum(columns, 0), axis=1)
      words = np.where(columns >= 0, reversed_, PAD).astype(np.int32)
    if self._kind == "encoder":
      return words, lengths
    return _append(words, lengths, EOS), lengths + 1

  def _prompts(self, words: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """What a decoder reads before it answers: w SEP, or SEP w SEP."""
    prompts = _append(words, lengths, SEP)
    if self._config.kind == "duplicate":
      prompts = np.pad(prompts, ((0, 0), (1, 0)), constant_values=SEP)
    return prompts

  def _prompt_length(self, length: Any) -> Any:
    return length + (2 if self._config.kind == "duplicate" else 1)

  def _target_length(self, length: int) -> int:
    """T of a batch whose longest w has `length` symbols."""
    if self._kind == "encoder":
      return length
    if self._kind == "encoder_decoder":
      return length + 1
    return self._prompt_length(length) + length


def make(
  config: CopyConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> CopyTask:
  """Makes the task; it needs nothing from disk.

  Args:
    config: which sequences.
    kind: the `layout` of the model; 'duplicate' is for decoders only.
    batch_size: rows of every batch.
    seed: another seed, other sequences.
    workdir: unused: nothing is stored.
    restore: unused, for the same reason.

  Raises:
    ValueError: a kind of model that this task cannot feed.
  """
  del workdir, restore
  return CopyTask(config, kind=kind, batch_size=batch_size, seed=seed)


def _append(words: np.ndarray, lengths: np.ndarray, last: int) -> np.ndarray:
  """[B, L] → [B, L + 1] with one more id after the end of each row."""
  longer = np.pad(words, ((0, 0), (0, 1)))
  np.put_along_axis(longer, lengths[:, None], last, axis=1)
  return longer


def _sum_weights(length: int) -> np.ndarray:
  """Weights of the held-out rule; small, so that the sum cannot overflow."""
  positions = np.arange(length, dtype=np.uint64)
  return positions * positions % np.uint64(65521) + np.uint64(1)
