"""Translation of number words: a corpus that needs no download.

German puts units before tens ("einundzwanzig") and writes a number as one word, so
en → de needs reordering, not only substitution.
"""

import num2words
import numpy as np

from settings.errors import DataError
from settings.hashing import splitmix64
from tasks.files import Pairs

_HELD_OUT = 8
"""One number in eight may be used for validation."""
_ALWAYS_TRAINED = 100
"""Smaller numbers are always trained; larger ones consist of their words."""


def held_out(numbers: np.ndarray) -> np.ndarray:
  """Returns whether each number [n] is held out of training, by a hash.

  The hash is SplitMix64, so a number is in the same split for all sizes of the splits.
  Numbers below 100 are always trained, because a word such as "zero" occurs in no other
  number.
  """
  x = splitmix64(numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
  return (x % np.uint64(_HELD_OUT) == 0) & (numbers >= _ALWAYS_TRAINED)


def choose_numbers(
  max_number: int, num_train: int, num_validation: int
) -> dict[str, np.ndarray]:
  """Draws disjoint training and validation numbers from 0 … max_number.

  Each number of digits gets an equal share, as far as there are enough numbers. In a
  uniform draw, nine of ten numbers would have the largest number of digits.

  Raises:
    DataError: there are fewer numbers than requested.
  """
  numbers = np.arange(max_number + 1)
  is_held_out = held_out(numbers)
  numbers_by_split = {}
  for name, field, pool, count in (
    ("train", "num_train", numbers[~is_held_out], num_train),
    ("validation", "num_validation", numbers[is_held_out], num_validation),
  ):
    if count > len(pool):
      raise DataError(
        f"task.{field}: expected at most {len(pool)}, the {name} numbers up to "
        f"max_number={max_number}, got {count}"
      )
    numbers_by_split[name] = _draw(pool, count)
  return numbers_by_split


def check_languages(source: str, target: str) -> None:
  """Raises DataError for a language that num2words does not support."""
  for field, language in (
    ("source_language", source),
    ("target_language", target),
  ):
    if language not in num2words.CONVERTER_CLASSES:
      known = ", ".join(sorted(num2words.CONVERTER_CLASSES))
      raise DataError(
        f"task.{field}: num2words supports {known}, not {language!r}"
      )


def number_pairs(
  source: str, target: str, numbers: dict[str, np.ndarray]
) -> dict[str, Pairs]:
  """Spells numbers in two languages; about 0.2 ms per pair."""

  def spell(number: int) -> tuple[str, str]:
    return (
      num2words.num2words(number, lang=source),
      num2words.num2words(number, lang=target),
    )

  return {
    split: [spell(int(n)) for n in chosen] for split, chosen in numbers.items()
  }


def _draw(pool: np.ndarray, count: int) -> np.ndarray:
  """Draws `count` sorted numbers from a sorted pool, evenly by number of digits."""
  digits = np.searchsorted(10 ** np.arange(1, 19), pool, side="right")
  groups = [pool[digits == d] for d in np.unique(digits)]
  # Small groups first, because larger ones supply the numbers that these lack.
  groups.sort(key=len)
  rng = np.random.default_rng(0)
  drawn = []
  for i, group in enumerate(groups):
    # The last group supplies the remainder. It has enough numbers, because each smaller
    # group supplied its share or all of its numbers.
    share = min(len(group), (count - sum(map(len, drawn))) // (len(groups) - i))
    drawn.append(rng.choice(group, share, replace=False, shuffle=False))
  return np.sort(np.concatenate(drawn))
