"""SplitMix64, a hash whose values never change."""

import numpy as np


def splitmix64(x: np.ndarray) -> np.ndarray:
  """Applies the finaliser of SplitMix64 to each number of a uint64 array.

  The generator's output for a state s is the finaliser of s + 0x9E3779B97F4A7C15.

  Paper: Fast splittable pseudorandom number generators, Steele et al. 2014.
  """
  x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
  x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
  return x ^ (x >> np.uint64(31))
