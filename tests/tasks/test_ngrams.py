"""Losses of counted tokens and pairs, against dictionaries."""

import collections
import math

import numpy as np
import pytest

from tasks.text.ngrams import NONE, Pairs, ngram_losses
from tests.tasks.text_cases import HELD_OUT, TEXT, make


def naive(training, held_out, size):
  """Both losses, in Python's floats, one token after the other."""
  counts = collections.Counter(training.token.tolist())
  pairs = collections.Counter(
    zip(training.left.tolist(), training.token.tolist(), strict=True)
  )
  unigram, bigram = [], []
  for left, token in zip(*held_out, strict=True):
    p = (counts[token] + 1) / (len(training.token) + size)
    unigram.append(-math.log(p))
    followers = {t: n for (s, t), n in pairs.items() if s == left}
    if followers:
      seen, kinds = sum(followers.values()), len(followers)
      p = (followers.get(token, 0) + kinds * p) / (seen + kinds)
    bigram.append(-math.log(p))
  return {"unigram_loss": np.mean(unigram), "bigram_loss": np.mean(bigram)}


@pytest.mark.parametrize("size", [5, 40])
def test_both_losses_are_those_of_dictionaries(size):
  rng = np.random.default_rng(size)
  # The last id is held out alone, and some tokens have no neighbour.
  training = Pairs(
    rng.integers(NONE, size - 1, 101), rng.integers(0, size - 1, 101)
  )
  held_out = Pairs(rng.integers(NONE, size, 37), rng.integers(0, size, 37))
  expected = naive(training, held_out, size)
  assert ngram_losses(training, held_out, size) == pytest.approx(expected)


def test_probabilities_of_all_tokens_sum_to_one():
  rng = np.random.default_rng(0)
  training = Pairs.from_text(rng.integers(0, 6, 30))
  for left in range(NONE, 8):
    total = collections.Counter()
    for token in range(8):
      losses = ngram_losses(
        training, Pairs(np.array([left]), np.array([token])), 8
      )
      for name, loss in losses.items():
        total[name] += math.exp(-loss)
    assert dict(total) == pytest.approx({"unigram_loss": 1, "bigram_loss": 1})


def test_of_a_decoder_every_held_out_token_counts(path):
  task = make(path, "decoder")
  train = np.array(task.encode_target(TEXT[: int(0.9 * len(TEXT))]))
  held_out = np.array(task.encode_target(HELD_OUT))
  expected = naive(
    Pairs.from_text(train), Pairs.from_text(held_out), task.target_vocab_size
  )
  assert task.baselines == pytest.approx(expected)
  assert expected["bigram_loss"] < expected["unigram_loss"] - 0.5


def test_of_an_encoder_masked_tokens_count_with_their_true_neighbours(path):
  task = make(path, "encoder")
  train = np.array(task.encode_target(TEXT[: int(0.9 * len(TEXT))]))
  left, token = [], []
  for batch in task.eval_batches("validation"):
    for row, weights in zip(batch["targets"], batch["weights"], strict=True):
      for place in np.flatnonzero(weights):
        left.append(row[place - 1])
        token.append(row[place])
  found = Pairs(np.array(left), np.array(token))
  expected = naive(Pairs.from_text(train), found, task.target_vocab_size)
  assert task.baselines == pytest.approx(expected)


def test_of_an_encoder_decoder_targets_count_with_their_sentinels(path):
  task = make(path, "encoder_decoder")
  batches = list(task.eval_batches("validation"))
  counted = [batch["weights"] > 0 for batch in batches]
  assert task.baselines["bigram_loss"] < task.baselines["unigram_loss"]
  # A sentinel follows BOS always, and EOS the last one.
  both = list(zip(batches, counted, strict=True))
  left, token = (
    np.concatenate([batch[name][there] for batch, there in both])
    for name in ("inputs", "targets")
  )
  held_out = Pairs(left, token)
  training = task._training_pairs()
  expected = naive(training, held_out, task.target_vocab_size)
  assert task.baselines == pytest.approx(expected)
  # Each token of the training text is in a target about once.
  ordinary = np.isin(training.token, task._vocabulary.ordinary).sum()
  assert 0.9 < ordinary / len(task._train) < 1.1
