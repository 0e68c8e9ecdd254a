"""Translation: number words, aligned text files, or any TFDS dataset by name."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import logging
import pathlib
import re
from typing import Any

import numpy as np
import sacrebleu

from tasks import base
from tasks.base import BOS, EOS, PAD, Batch, DataError, DecodeBatch
from tasks.bucketing import BucketedBatches, Ragged, choose_shapes, fit
from tasks.corpora import AUTOMATIC_SIZES, TranslationConfig, open_corpus
from tasks.vocabulary import LIST_FILE, Subwords, cached_subwords

# Vaswani et al. (2017), 6.1: outputs at most 50 tokens longer than the input.
_EXTRA_LENGTH = 50

_TOKENIZERS = {
  **dict.fromkeys(("zh", "zho", "cmn", "yue", "cn"), "zh"),
  **dict.fromkeys(("ja", "jpn", "jp"), "ja-mecab"),
  **dict.fromkeys(("ko", "kor"), "ko-mecab"),
  # Thai, Lao, Khmer, Burmese and Tibetan.
  **dict.fromkeys(("th", "tha", "lo", "lao", "km", "khm"), "char"),
  **dict.fromkeys(("my", "mya", "bo", "bod"), "char"),
}
"""Maps target languages to SacreBLEU's tokenizers; other languages use '13a'.

Without spaces between words, 13a would treat a sentence as one word.
"""


def bleu_metric(language: str) -> sacrebleu.BLEU:
  """Creates SacreBLEU's metric for a target language, such as 'zh' or 'zh-CN'.

  Raises:
    DataError: the tokenizer needs a package that is missing.
  """
  code = re.split("[-_]", language.lower())[0]
  tokenizer = _TOKENIZERS.get(code, "13a")
  try:
    return sacrebleu.BLEU(tokenize=tokenizer)
  except RuntimeError as error:
    raise DataError(
      f"task.target_language: BLEU of {language!r} needs a package that is missing; "
      f'pip install "sacrebleu[{tokenizer[:2]}]"'
    ) from error


class EncodedPairs:
  """One split as int32 ids; each sentence has EOS but not BOS.

  Attributes:
    source: ids of the sources.
    target: ids of the targets.
    lengths: [n, 2] numbers of source and target tokens.
    references: the targets as text; empty unless `keep_text`.
  """

  def __init__(
    self,
    chunks: Iterable[tuple[list[str], list[str]]],
    vocabulary: Subwords,
    keep_text: bool,
  ):
    sources, targets = [], []
    self.references: list[str] = []
    for source_text, target_text in chunks:
      # One chunk at a time, because lists of Python integers take ten times the
      # memory.
      sources.append(Ragged.stack(with_eos(vocabulary.encode(source_text))))
      targets.append(Ragged.stack(with_eos(vocabulary.encode(target_text))))
      if keep_text:
        self.references += target_text
    self.source = Ragged.join(sources)
    self.target = Ragged.join(targets)
    self.lengths = np.stack([self.source.lengths, self.target.lengths], axis=1)

  def batch(self, rows: np.ndarray, shape: tuple[int, int]) -> Batch:
    """Rows in one shape (S, T); a truncated row still ends in EOS."""
    targets = pad_with_eos(self.target, rows, shape[1])
    inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=BOS)
    return {
      "source": pad_with_eos(self.source, rows, shape[0]),
      "inputs": inputs * (targets != PAD),
      "targets": targets,
      "weights": (targets != PAD).astype(np.float32),
    }


def with_eos(rows: list[list[int]]) -> list[list[int]]:
  """Adds EOS to every row."""
  return [[*row, EOS] for row in rows]


def pad_with_eos(ragged: Ragged, rows: np.ndarray, length: int) -> np.ndarray:
  """Rows as [len(rows), length]; a truncated row still ends in EOS."""
  padded = ragged.pad(rows, length)
  padded[ragged.lengths[rows] > length, -1] = EOS
  return padded


class TranslationTask(base.Task):
  """Sentence pairs for an encoder-decoder, with one vocabulary for both sides.

  `splits` is None for a restored task, which only encodes and decodes.
  """

  shared_vocabulary = True

  def __init__(
    self,
    config: TranslationConfig,
    vocabulary: Subwords,
    splits: dict[str, EncodedPairs] | None,
    *,
    batch_size: int,
    seed: int,
  ):
    self._config = config
    self._vocabulary = vocabulary
    self._batch_size = batch_size
    self._splits = splits or {}
    self.source_vocab_size = self.target_vocab_size = vocabulary.size
    self.max_source_length = self.max_target_length = config.max_length
    tests = sorted(name for name in self._splits if name.startswith("test"))
    self.eval_splits = ("validation", *tests) if splits else ()
    if splits:
      self._prepare_batches(seed)

  def _prepare_batches(self, seed: int) -> None:
    limit = self._config.max_length
    lengths = self._splits["train"].lengths
    # An empty side consists of EOS only.
    self._rows = np.flatnonzero(np.all((lengths > 1) & (lengths <= limit), 1))
    log = logging.getLogger(__name__)
    if not len(self._rows):
      raise DataError(
        f"task.max_length: none of {len(lengths)} training pairs has 1 to "
        f"{limit - 1} tokens and EOS on either side"
      )
    if len(self._rows) < len(lengths):
      log.warning(
        "omitted %d of %d training pairs: an empty side, or more than "
        "task.max_length=%d tokens (longest: %d)",
        len(lengths) - len(self._rows),
        len(lengths),
        limit,
        lengths.max(),
      )
    for name in self.eval_splits:
      truncated = (self._splits[name].lengths > limit).sum(axis=0)
      if truncated.any():
        log.warning(
          "%s: %d sources and %d targets cut to task.max_length=%d tokens; "
          "references stay whole",
          name,
          *truncated,
          limit,
        )
    lengths = lengths[self._rows]
    self._shapes = choose_shapes(lengths, self._config.num_buckets)
    self._batches = BucketedBatches(
      lengths, self._shapes, self._batch_size, seed
    )

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """The batch of a step, in one of at most `num_buckets` shapes."""
    indices, shape = self._batches.batch(step)
    if rows is not None:
      indices = indices[rows]
    return self._splits["train"].batch(self._rows[indices], shape)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields every pair once, short pairs first."""
    data = self._splits[split]
    lengths = np.minimum(data.lengths, self._config.max_length)
    order = np.lexsort((lengths.sum(axis=1), fit(self._shapes, lengths)))
    for rows in self._chunks(order):
      shape = self._shape(lengths[rows].max(axis=0))
      yield base.pad_rows(data.batch(rows, shape), self._batch_size)

  def decode_batches(self, split: str) -> Iterator[DecodeBatch]:
    """Yields every source once, short ones first, in at most three lengths.

    Each length compiles its own decoding loop. A few lengths are enough, because the
    cost depends mainly on the outputs.
    """
    data, limit = self._splits[split], self._config.max_length
    lengths = np.minimum(data.source.lengths, limit)
    sides = np.unique(self._shapes[:, 0])
    sides = np.unique([sides[len(sides) // 2], sides[-1], limit])
    for rows in self._chunks(np.argsort(lengths, kind="stable")):
      longest = int(sides[np.searchsorted(sides, lengths[rows].max())])
      padded = rows[base.repeat_rows(len(rows), self._batch_size)]
      yield DecodeBatch(
        {"source": pad_with_eos(data.source, padded, longest)},
        [data.references[row] for row in rows],
        min(longest + _EXTRA_LENGTH, limit),
      )

  def metric_sums(
    self, logits: Any, batch: Mapping[str, Any]
  ) -> dict[str, Any]:
    """Token accuracy, given the correct prefix."""
    accuracy = base.token_accuracy(logits, batch["targets"], batch["weights"])
    return {"token_accuracy": accuracy}

  def score(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> dict[str, float | str]:
    """Corpus BLEU with SacreBLEU's signature (Post 2018), and exact match.

    The target language determines the tokenizer, as in SacreBLEU. Number words have
    only exact match: a number has one translation, and in German it is a single word,
    without n-grams to count.

    If no reference has four tokens, there are no 4-grams, and the usual BLEU is 0 even
    for a perfect output. The order is then the largest possible one, which the
    signature states ('eff').
    """
    pairs = list(zip(hypotheses, references, strict=True))
    if not pairs:  # SacreBLEU would raise IndexError.
      return {}
    # BLEU does not count spaces either.
    exact = sum(h.split() == r.split() for h, r in pairs) / len(pairs)
    if self._config.source == "numbers":
      return {"exact_match": exact}
    metric = bleu_metric(self._config.target_language)
    longest = max(len(metric.tokenizer(r).split()) for r in references)
    metric.effective_order = longest < 4
    bleu = metric.corpus_score(list(hypotheses), [list(references)])
    return {
      "bleu": bleu.score,
      "exact_match": exact,
      "bleu_signature": str(metric.get_signature()),
    }

  def sentence_statistics(
    self, hypotheses: Sequence[str], references: Sequence[str]
  ) -> list[list[int]]:
    """The statistics of each sentence that corpus BLEU sums.

    Args:
      hypotheses: as in `score`.
      references: as in `score`.

    Returns:
      Ten numbers per sentence: matching n-grams of order 1 to 4, all n-grams of
      order 1 to 4, the length of the hypothesis, and the length of the reference.
      Empty for number words, which have no BLEU.
    """
    if self._config.source == "numbers":
      return []
    # The effective order does not affect the counts; without it, SacreBLEU warns.
    metric = bleu_metric(self._config.target_language)
    metric.effective_order = True
    scores = [
      metric.sentence_score(hypothesis, [reference])
      for hypothesis, reference in zip(hypotheses, references, strict=True)
    ]
    return [[*s.counts, *s.totals, s.sys_len, s.ref_len] for s in scores]

  def encode(self, line: str) -> list[int]:
    """Source ids with EOS; unknown characters become the unknown piece."""
    [ids] = with_eos(self._vocabulary.encode([line]))
    if len(ids) > self._config.max_length:
      raise ValueError(
        f"{len(ids)} tokens, more than task.max_length="
        f"{self._config.max_length}; split the line"
      )
    return ids

  def encode_target(self, line: str) -> list[int]:
    """Same as `encode`, because both sides share the vocabulary."""
    return self.encode(line)

  def decode(self, ids: Sequence[int] | np.ndarray) -> str:
    """Text of ids, up to EOS."""
    return self._vocabulary.decode(ids)

  def labels(self, ids: Sequence[int] | np.ndarray) -> list[str]:
    """The subword of each id."""
    return self._vocabulary.labels(ids)

  def save(self, directory: pathlib.Path) -> None:
    """Writes the vocabulary."""
    self._vocabulary.save(directory)

  def _chunks(self, order: np.ndarray) -> Iterator[np.ndarray]:
    for indices in base.chunks(len(order), self._batch_size):
      yield order[indices]

  def _shape(self, longest: np.ndarray) -> tuple[int, int]:
    [index] = fit(self._shapes, longest[None])
    if index == len(self._shapes):  # Longer than any training pair.
      return self._config.max_length, self._config.max_length
    source, target = self._shapes[index]
    return int(source), int(target)


def make(
  config: TranslationConfig,
  *,
  kind: str,
  batch_size: int,
  seed: int,
  workdir: pathlib.Path | None = None,
  restore: bool = False,
) -> TranslationTask:
  """Prepares data, trains the vocabulary, encodes everything; see `TaskEntry`.

  Prepared data and vocabularies are stored in the cache (`cache.py`), from which
  later starts read them.
  """
  base.layout("translation", kind, ("encoder_decoder",))
  if restore:
    vocabulary = Subwords.load(workdir)
    return TranslationTask(
      config, vocabulary, None, batch_size=batch_size, seed=seed
    )

  corpus = open_corpus(config)
  if config.source != "numbers":
    bleu_metric(
      config.target_language
    )  # Raises before a vocabulary is trained.
  vocabulary = cached_subwords(
    corpus.training_text(),
    config.vocab_size or AUTOMATIC_SIZES[config.source],
    corpus.digest,
  )
  base.check_vocabulary(workdir, LIST_FILE, vocabulary.content())
  splits = {
    name: EncodedPairs(corpus.read(name), vocabulary, keep_text=name != "train")
    for name in corpus.splits
    if name in ("train", "validation") or name.startswith("test")
  }
  return TranslationTask(
    config, vocabulary, splits, batch_size=batch_size, seed=seed
  )
