"""Strings of digits, dialled as DTMF tones (ITU-T Q.23) in noise.

An example is a pure function of (seed, split, index); see `tasks.draws`.
"""

from typing import NamedTuple

import numpy as np

from tasks import draws

DIGITS = "0123456789"

_LOW = (941, 697, 697, 697, 770, 770, 770, 852, 852, 852)
_HIGH = (1336, 1209, 1336, 1477, 1209, 1336, 1477, 1209, 1336, 1477)

_TONE = 0.06, 0.15
_GAP = 0.04, 0.12
_SILENCE = 0.05, 0.20
"""Shortest and longest duration in seconds; the silence precedes the first tone."""

_DIGIT_LEVEL = 3.0
_STRING_LEVEL = 10.0
"""Largest deviation of levels from 1 in either direction, in decibels."""


class DialledStrings(NamedTuple):
  """Recordings of a batch.

  Attributes:
    samples: [B, S] float32, with noise throughout.
    num_samples: [B], the end of each recording.
    digits: [B, U] from 0, −1 after the last.
  """

  samples: np.ndarray
  num_samples: np.ndarray
  digits: np.ndarray


def longest(max_digits: int, sample_rate: int) -> int:
  """S, the largest number of samples of a recording."""
  seconds = _SILENCE[1] + max_digits * (_TONE[1] + _GAP[1])
  return int(np.ceil(seconds * sample_rate)) + 2 * max_digits + 1


def dial(
  key: np.ndarray,
  indices: np.ndarray,
  *,
  min_digits: int,
  max_digits: int,
  sample_rate: int,
  snr: float,
) -> DialledStrings:
  """Computes the recordings of examples.

  A digit is the sum of two sines, 60 to 150 ms long, followed by 40 to 120 ms of
  silence. Its level is up to 3 dB above or below that of its string, and the level of a
  string is up to 10 dB above or below 1; phases are random. The power of the white noise
  is the mean power of the string's tones, without silence, divided by 10^(snr/10).

  Args:
    key: key of the split, from `draws.split_key`.
    indices: numbers of the examples.
    min_digits: smallest number of digits; all numbers up to `max_digits` are equally
      likely.
    max_digits: U, the largest number of digits.
    sample_rate: samples per second.
    snr: signal-to-noise ratio in decibels.

  Returns:
    The recordings.
  """
  size, count = longest(max_digits, sample_rate), len(indices)
  numbers = 3 + 6 * max_digits
  raw = draws.words(key, indices, numbers + size // 2 + 1)
  words, noise = raw[:, :numbers], _normal(raw[:, numbers:])[:, :size]
  uniform = (words >> np.uint64(11)) * 2.0**-53
  lengths = min_digits + draws.below(words[:, 0], max_digits - min_digits + 1)
  level = 10 ** (_STRING_LEVEL / 20 * (2 * uniform[:, 1:2] - 1))
  start = np.round(_scale(_SILENCE, uniform[:, 2]) * sample_rate).astype(int)
  per_digit = uniform[:, 3:].reshape(count, max_digits, 6)
  digits = draws.below(words[:, 3::6], len(DIGITS))
  digits[np.arange(max_digits) >= lengths[:, None]] = -1
  tones = np.round(_scale(_TONE, per_digit[:, :, 1]) * sample_rate)
  gaps = np.round(_scale(_GAP, per_digit[:, :, 2]) * sample_rate)
  samples = np.zeros((count, size), np.float32)
  for row in range(count):
    first, tone_length, power = start[row], 0, 0.0
    for j in range(lengths[row]):
      length, digit = int(tones[row, j]), digits[row, j]
      loudness = _decibels(_DIGIT_LEVEL * (2 * per_digit[row, j, 3] - 1))
      time = np.arange(length, dtype=np.float32) * np.float32(
        2 * np.pi / sample_rate
      )
      low, high = 2 * np.pi * per_digit[row, j, 4:]
      tone = np.sin(_LOW[digit] * time + np.float32(low))
      tone += np.sin(_HIGH[digit] * time + np.float32(high))
      tone *= np.float32(loudness)
      samples[row, first : first + length] = tone
      tone_length += length
      power += float(np.square(tone).sum())
      first += length + int(gaps[row, j])
    start[row] = first
    noise[row] *= np.sqrt(power / tone_length) * _decibels(-snr)
  samples = ((samples + noise) * level).astype(np.float32)
  return DialledStrings(samples, start, digits)


def _scale(limits: tuple[float, float], uniform: np.ndarray) -> np.ndarray:
  return limits[0] + (limits[1] - limits[0]) * uniform


def _decibels(x: float) -> float:
  """The amplitude factor of a number of decibels."""
  return 10.0 ** (x / 20)


def _normal(raw: np.ndarray) -> np.ndarray:
  """Converts each word [B, K] to two normal numbers [B, 2 K] (Box and Muller 1958)."""
  # Halves of 32 bits; the first is never 0.
  first = ((raw >> np.uint64(32)).astype(np.float32) + 1) * np.float32(2**-32)
  angle = (raw & np.uint64(2**32 - 1)).astype(np.float32)
  angle *= np.float32(2 * np.pi * 2.0**-32)
  # Rounding may give a number slightly above 1, whose logarithm is positive.
  radius = np.sqrt(np.maximum(-2 * np.log(first), 0))
  return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], 1)
