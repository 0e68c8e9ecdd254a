"""Number words: what is spelled, and what is held out."""

import numpy as np
import pytest

import tasks
from tasks import numbers


@pytest.mark.parametrize(
  ("number", "english", "german"),
  [
    (0, "zero", "null"),
    (1, "one", "eins"),
    (21, "twenty-one", "einundzwanzig"),
    (342, "three hundred and forty-two", "dreihundertzweiundvierzig"),
    (1000, "one thousand", "eintausend"),
    (
      21_017,
      "twenty-one thousand and seventeen",
      "einundzwanzigtausendsiebzehn",
    ),
  ],
)
def test_number_words(number, english, german):
  chosen = {"train": np.array([number])}
  assert numbers.number_pairs("en", "de", chosen) == {
    "train": [(english, german)]
  }


def test_splits_are_disjoint_and_sorted():
  chosen = numbers.choose_numbers(999_999, 20_000, 1_000)
  train, validation = chosen["train"], chosen["validation"]
  assert len(train) == len(set(train)) == 20_000
  assert len(validation) == len(set(validation)) == 1_000
  assert not set(train) & set(validation)
  assert set(range(100)) <= set(train)
  assert (np.diff(train) > 0).all()


def test_a_number_stays_on_its_side_whatever_the_sizes():
  sides = [
    numbers.choose_numbers(top, train, validation)
    for top, train, validation in [(9999, 500, 100), (999_999, 9000, 2000)]
  ]
  for a in sides:
    for b in sides:
      assert not set(a["train"]) & set(b["validation"])


def test_digits_have_equal_shares():
  train = numbers.choose_numbers(999_999, 20_000, 1_000)["train"]
  counts = np.bincount([len(str(n)) for n in train])[1:]
  assert counts.tolist()[:2] == [10, 90]
  assert counts[3:].max() - counts[3:].min() <= 1


def test_one_in_eight_is_held_out():
  share = numbers.held_out(np.arange(100, 100_000)).mean()
  assert share == pytest.approx(1 / 8, abs=0.005)
  assert not numbers.held_out(np.arange(100)).any()


def splitmix64(state):
  """The generator's first number: Steele et al. 2014, with Python's integers."""
  z = (state + 0x9E3779B97F4A7C15) % 2**64
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
  z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
  return z ^ z >> 31


def test_which_numbers_are_held_out_never_changes():
  # A test vector of the generator.
  assert splitmix64(1234567) == 6457827717110365317
  found = np.flatnonzero(numbers.held_out(np.arange(3000)))
  assert found.tolist() == [
    n for n in range(100, 3000) if splitmix64(n) % 8 == 0
  ]


def test_everything_can_be_asked_for():
  withheld = int(numbers.held_out(np.arange(1000)).sum())
  chosen = numbers.choose_numbers(999, 1000 - withheld, withheld)
  union = np.concatenate([chosen["train"], chosen["validation"]])
  np.testing.assert_array_equal(np.sort(union), np.arange(1000))


@pytest.mark.parametrize(
  ("sizes", "field"), [((999, 1000, 10), "train"), ((999, 10, 200), "valid")]
)
def test_too_many(sizes, field):
  with pytest.raises(
    tasks.DataError, match=rf"^task\.num_{field}\w*: expected at most \d+, the "
  ):
    numbers.choose_numbers(*sizes)


def test_unknown_language():
  with pytest.raises(
    tasks.DataError,
    match=r"^task\.target_language: num2words supports .* 'xx'$",
  ):
    numbers.check_languages("en", "xx")
