"""Masked language modelling for an encoder (BERT)."""

from collections.abc import Iterator

import numpy as np

from tasks import base
from tasks.base import Batch
from tasks.special_tokens import OWN_ENCODER
from tasks.text.ngrams import NONE, Pairs
from tasks.text.task import TextConfig, TextTask

_MASKED, _RANDOM = 0.8, 0.1


def mask_tokens(
  rng: np.random.Generator,
  tokens: np.ndarray,
  rate: float,
  mask_id: int,
  ordinary: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
  """Chooses tokens to predict, and masks most of them.

  In each row of n tokens, max(1, round(rate · n)) are chosen uniformly at random. A
  chosen token becomes the mask with probability 0.8, a random token with probability
  0.1, and stays unchanged with probability 0.1.

  Args:
    rng: random number generator.
    tokens: [B, n] ids.
    rate: share of tokens that are chosen.
    mask_id: id of the mask.
    ordinary: ids from which random tokens are drawn. BERT draws them from all ids,
      including special tokens.

  Returns:
    The inputs of the model, [B, n], and a mask of the chosen tokens, [B, n] bool.

  Cost: O(B n log n) time, O(B n) memory.

  Paper: BERT, section 3.1 and appendix A.1, arXiv:1810.04805.
  """
  length = tokens.shape[1]
  count = max(1, round(rate * length))
  first = np.argsort(rng.random(tokens.shape), axis=1)[:, :count]
  is_target = np.zeros(tokens.shape, bool)
  np.put_along_axis(is_target, first, True, axis=1)
  draw = rng.random(tokens.shape)
  random_ids = rng.choice(ordinary, tokens.shape)
  corrupted = np.where(
    draw < _MASKED,
    mask_id,
    np.where(draw < _MASKED + _RANDOM, random_ids, tokens),
  )
  return np.where(is_target, corrupted, tokens).astype(np.int32), is_target


class MaskedText(TextTask):
  """Pieces of a text, in which some tokens are masked and predicted.

  encoder: source and targets [B, S], with `[CLS] … [SEP]` if the vocabulary has
  both; weights at the chosen tokens. Every training step draws from (seed, step).
  Every token of the held-out text is read exactly once, and the chosen tokens are the
  same in every evaluation of every run.
  """

  objective = "masked language modelling"
  shared_vocabulary = True

  def __init__(self, config: TextConfig, vocabulary, *args, **options):
    super().__init__(config, vocabulary, *args, **options)
    self._mask_id = self._need("mask")
    special = vocabulary.special
    # An encoder predicts no end of a sequence.
    self.eos_id = self.pad_id if special.eos is None else special.eos
    self._before, self._after = special.encoder_tokens
    self.source_vocab_size = self.target_vocab_size
    self.max_source_length = self.max_target_length = config.context
    num_special = config.context - self.piece
    if self.piece < 2:
      raise ValueError(
        f"task.context: expected at least {2 + num_special} tokens, {num_special} of them "
        f"special, got {config.context}"
      )

  @classmethod
  def own_tokens(cls, config: TextConfig) -> tuple[str, ...]:
    """The special tokens that an encoder needs."""
    del config
    return OWN_ENCODER

  @property
  def piece(self) -> int:
    """S minus the special tokens before and after the text."""
    num_special = len(self._before) + len(self._after)
    return self._config.context - num_special

  def train_batch(self, step: int, rows: np.ndarray | None = None) -> Batch:
    """B masked pieces from random positions, drawn from (seed, step)."""
    rng = np.random.default_rng((self._seed, step))
    tokens = self._windows(rng, self.piece)
    return base.select_rows(self._batch(tokens, *self._mask(rng, tokens)), rows)

  def eval_batches(self, split: str) -> Iterator[Batch]:
    """Yields the held-out text in order; each token is read exactly once."""
    text = self.tokens(split)
    for starts in self._starts(len(text)):
      yield self._held_out_batch(text, starts, self._held_out_row)

  def encode(self, line: str) -> list[int]:
    """Ids of a line between special tokens; recognises the name of the mask."""
    ids = self._vocabulary.encode(line)
    ids = [*self._before, *ids, *self._after]
    return self._check_length(ids, self._config.context)

  def _held_out_row(
    self, tokens: np.ndarray, rng: np.random.Generator
  ) -> Batch:
    return self._batch(tokens, *self._mask(rng, tokens))

  def _mask(
    self, rng: np.random.Generator, tokens: np.ndarray
  ) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(
      rng,
      tokens,
      self._config.mask_rate,
      self._mask_id,
      self._vocabulary.ordinary,
    )

  def _batch(
    self, tokens: np.ndarray, inputs: np.ndarray, is_target: np.ndarray
  ) -> Batch:
    """Rows of one length, with special tokens and padding up to S."""
    count, length = tokens.shape
    padding = [self.pad_id] * (self.piece - length)
    prefix, suffix = (
      np.tile(np.array(ids, np.int32), (count, 1))
      for ids in (self._before, self._after + padding)
    )
    widths = (0, 0), (len(self._before), len(self._after) + len(padding))
    is_token = np.arange(self._config.context)
    is_token = is_token < self._config.context - len(padding)
    return {
      "source": np.hstack([prefix, inputs, suffix]),
      "source_mask": np.tile(is_token, (count, 1)),
      "targets": np.hstack([prefix, tokens, suffix]),
      "weights": np.pad(is_target.astype(np.float32), widths),
    }

  def _predicted(self, batch: Batch) -> Pairs:
    """The neighbours of predicted tokens in the text, masked or not."""
    targets, is_weighted = batch["targets"], batch["weights"] > 0
    left = np.pad(targets[:, :-1], ((0, 0), (1, 0)), constant_values=NONE)
    return Pairs(left[is_weighted], targets[is_weighted])
