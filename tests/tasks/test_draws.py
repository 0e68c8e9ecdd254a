"""Random numbers by index: independent of batches, and of the right law."""

import itertools

import numpy as np

from tasks import draws

KEY = draws.split_key(0, "train")


def raw(rows, columns):
  return draws.words(KEY, np.arange(rows), columns)


def test_splits_and_seeds_have_keys_of_their_own():
  keys = {
    tuple(draws.split_key(seed, split))
    for seed in (0, 1)
    for split in ("train", "validation", "test", "length_64")
  }
  assert len(keys) == 8


def test_words_follow_from_the_index():
  words = raw(6, 9)
  np.testing.assert_array_equal(
    draws.words(KEY, np.array([4, 1]), 9), words[[4, 1]]
  )
  np.testing.assert_array_equal(
    draws.words(KEY, np.array([4]), 3)[0], words[4, :3]
  )
  assert len(np.unique(words)) == words.size


def test_a_stream_goes_on_where_the_words_end():
  first = list(itertools.islice(draws.stream(KEY, 3), 1500))
  np.testing.assert_array_equal(first, raw(4, 1500)[3])


def test_distinct_numbers_are_distinct_and_uniform():
  drawn = draws.distinct(raw(4000, 3), 5)
  assert all(len(set(row)) == 3 for row in drawn.tolist())
  # Every ordered choice of 3 out of 5 is as likely as the other 59.
  _, counts = np.unique(drawn, axis=0, return_counts=True)
  assert len(counts) == 60
  np.testing.assert_allclose(counts / 4000, 1 / 60, atol=0.01)
  every = draws.distinct(raw(20, 7), 7)
  np.testing.assert_array_equal(np.sort(every, axis=1), [range(7)] * 20)


def test_weighted_draws_follow_the_shares_of_what_is_left():
  weights = np.array([4.0, 2.0, 1.0, 1.0])
  drawn = draws.distinct_weighted(raw(20_000, 4), weights, 2)
  first = np.bincount(drawn[:, 0], minlength=4) / 20_000
  np.testing.assert_allclose(first, weights / 8, atol=0.015)
  second = drawn[drawn[:, 0] == 0, 1]
  shares = np.bincount(second, minlength=4) / len(second)
  np.testing.assert_allclose(shares, [0, 0.5, 0.25, 0.25], atol=0.02)
