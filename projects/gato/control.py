"""CartPole as tokens: an expert's episodes, and episodes that a model plays.

The environment is from gymnasium, which is imported late.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from settings.errors import DataError

ENVIRONMENT = "CartPole-v1"

NUM_VALUES = 4
"""Number of values of an observation: position and speed of cart and pole."""

NUM_ACTIONS = 2

LONGEST = 500
"""Largest number of steps of an episode; each has a reward of 1."""

STEP_TOKENS = NUM_VALUES + 2
"""Number of tokens of a time step: the observation, a separator and the action."""

BINS = 1024

_EXPERT = np.array([0.1, 0.3, 1.0, 0.3], np.float32)
"""The expert pushes to the right if the product with the observation is above 0.

It balances the pole for all 500 steps, and nearly always does so even if a fifth of its
actions are random.
"""

_RANDOM = 0.2
"""Share of random actions in training, so that the data show how to recover."""

_MU, _RANGE = 100.0, 256.0


class Episodes(NamedTuple):
  """Observations and actions of an expert.

  Attributes:
    values: [E, 500, 4] float32.
    actions: [E, 500] int32.
    is_expert: [E, 500] bool, False for random actions.
    lengths: [E], the number of steps of each episode.
  """

  values: np.ndarray
  actions: np.ndarray
  is_expert: np.ndarray
  lengths: np.ndarray


def mu_law(values: np.ndarray) -> np.ndarray:
  """Discretises real numbers into bins that are narrow near 0 and wide elsewhere.

      F(x) = sign(x) · log(|x| μ + 1) / log(M μ + 1),   μ = 100, M = 256

  F(x) is clipped to [−1, 1], which is divided into 1,024 equal bins.

  Paper: A generalist agent, appendix B, arXiv:2205.06175.
  """
  x = np.asarray(values, np.float64)
  companded = np.sign(x) * np.log(np.abs(x) * _MU + 1)
  companded = np.clip(companded / np.log(_RANGE * _MU + 1), -1, 1)
  return np.minimum((companded + 1) / 2 * BINS, BINS - 1).astype(np.int32)


def bin_value(bins: np.ndarray) -> np.ndarray:
  """Returns the number at the centre of a bin, the inverse of `mu_law`."""
  companded = (np.asarray(bins) + 0.5) / BINS * 2 - 1
  size = np.expm1(np.abs(companded) * np.log(_RANGE * _MU + 1)) / _MU
  return np.sign(companded) * size


def expert(values: np.ndarray) -> np.ndarray:
  """Returns the expert's actions, 1 for right or 0 for left; `[…, 4] -> […]` int32."""
  return (values @ _EXPERT > 0).astype(np.int32)


def record(count: int, seed: int) -> Episodes:
  """Plays episodes with the expert, but replaces some actions by random ones.

  Args:
    count: E.
    seed: seed of the initial states and of the random actions.

  Raises:
    DataError: gymnasium is not installed.
  """
  rng = np.random.default_rng((seed, 1))
  is_expert = rng.random((count, LONGEST)) >= _RANDOM
  random_actions = rng.integers(NUM_ACTIONS, size=(count, LONGEST))

  def act(step, values):
    actions = np.where(
      is_expert[:, step], expert(values), random_actions[:, step]
    )
    return actions.astype(np.int32)

  values, actions, lengths = play(count, seed, act)
  return Episodes(values, actions, is_expert, lengths)


def play(
  count: int, seed: int, act: Callable[[int, np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Plays several episodes in parallel.

  Args:
    count: E.
    seed: seed of their initial states.
    act: `(step, values [E, 4]) -> actions [E]`; actions of finished episodes are
      ignored.

  Returns:
    Observations [E, 500, 4], actions [E, 500] and lengths [E], which equal the
    returns.

  Raises:
    DataError: gymnasium is not installed.
  """
  environment: Any = library().make_vec(
    ENVIRONMENT, num_envs=count, vectorization_mode="vector_entry_point"
  )
  observations = np.zeros((count, LONGEST, NUM_VALUES), np.float32)
  actions = np.zeros((count, LONGEST), np.int32)
  lengths = np.zeros(count, np.int64)
  is_running = np.ones(count, bool)
  values, _ = environment.reset(seed=seed)
  for step in range(LONGEST):
    observations[:, step] = values
    actions[:, step] = act(step, values)
    # A finished episode restarts; its further steps are ignored.
    values, _, terminated, truncated, _ = environment.step(actions[:, step])
    lengths += is_running
    is_running &= ~(terminated | truncated)
    if not is_running.any():
      break
  environment.close()
  return observations, actions, lengths


def library() -> Any:
  """Imports gymnasium.

  Raises:
    DataError: gymnasium is not installed.
  """
  try:
    import gymnasium
  except ImportError as error:
    raise DataError(
      f"task.control_rows: {ENVIRONMENT} needs gymnasium, which is not "
      "installed: pip install gymnasium, or set 0 rows"
    ) from error
  return gymnasium
