"""Number words from one language to another: a corpus that needs no download.

German says units before tens ("einundzwanzig") and writes a number as one word,
so en → de has to reorder; it is translation and not substitution.
"""

import num2words
import numpy as np

from settings.errors import DataError
from tasks.files import Pairs

_HELD_OUT = 8  # one number in eight may be used for validation
_ALWAYS_TRAINED = 100  # below it are the words that larger numbers are made of


def held_out(numbers: np.ndarray) -> np.ndarray:
  """Which numbers are held out of training; a hash decides, [n] → bool.

  The hash is SplitMix64's finaliser (Steele et al. 2014), so a number is on the
  same side for any sizes of the splits. Numbers below 100 are trained: a
  word such as "zero" occurs in no other number.
  """
  x = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  x ^= x >> np.uint64(31)
  return (x % np.uint64(_HELD_OUT) == 0) & (numbers >= _ALWAYS_TRAINED)


def choose_numbers(
  max_number: int, num_train: int, num_validation: int
) -> dict[str, np.ndarray]:
  """Draws disjoint training and validation numbers from 0 … max_number.

  Each count of digits gets an equal share, as far as it has so many numbers:
  drawn uniformly, nine in ten would have the most digits.

  Raises:
    DataError: more numbers asked for than there are.
  """
  numbers = np.arange(max_number + 1)
  withheld = held_out(numbers)
  chosen = {}
  for name, field, pool, count in (
    ("train", "num_train", numbers[~withheld], num_train),
    ("validation", "num_validation", numbers[withheld], num_validation),
  ):
    if count > len(pool):
      raise DataError(
        f"task.{field}: {count} asked for, but of the numbers up to max_number="
        f"{max_number} only {len(pool)} are for {name}"
      )
    chosen[name] = _draw(pool, count)
  return chosen


def check_languages(source: str, target: str) -> None:
  """Raises DataError for a language that num2words does not support."""
  for field, language in (
    ("source_language", source),
    ("target_language", target),
  ):
    if language not in num2words.CONVERTER_CLASSES:
      known = ", ".join(sorted(num2words.CONVERTER_CLASSES))
      raise DataError(
        f"task.{field}: num2words knows {known}, not {language!r}"
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
  """Draws `count` of a sorted pool, evenly over counts of digits, sorted."""
  digits = np.searchsorted(10 ** np.arange(1, 19), pool, side="right")
  groups = [pool[digits == d] for d in np.unique(digits)]
  # Small groups first: what they cannot give is shared by the larger ones.
  groups.sort(key=len)
  rng = np.random.default_rng(0)
  drawn = []
  for i, group in enumerate(groups):
    # The last share is whatever remains, and fits, as the pool is large enough
    # and every smaller group gave all it could.
    share = min(len(group), (count - sum(map(len, drawn))) // (len(groups) - i))
    drawn.append(rng.choice(group, share, replace=False, shuffle=False))
  return np.sort(np.concatenate(drawn))
