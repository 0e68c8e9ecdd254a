"""What rules see of Pathfinder that trace no path.

Nothing; where one disc is from the other; how far from the direction to the other disc
the path leaves each, in eighths of a turn, and how far the discs are apart.

    python -m benchmarks.rules --config=configs/pathfinder.py       # 20 seconds
"""

from collections.abc import Callable, Iterator
import math
from typing import NamedTuple

import numpy as np

from projects.pathfinder import task as pathfinder
from tasks.base import Batch, Task


class Seen(NamedTuple):
  """What rules may see of a picture.

  Attributes:
    across: rows and columns from the upper disc to the other.
    turns: of each disc, eighths of a turn between the direction to the other and
      that in which its path leaves, 0 to 4.
  """

  across: tuple[int, int]
  turns: tuple[int, int]


RULES: dict[str, Callable[[Seen], object]] = {
  "nothing": lambda seen: None,
  "the discs": lambda seen: seen.across,
  "the discs, and where paths leave": lambda seen: (
    max(map(abs, seen.across)),
    seen.turns,
  ),
}
"""Name -> what the rule sees."""


def seen(ink: np.ndarray) -> Seen:
  """What there is at the two discs of a picture.

  Args:
    ink: [size, size], boolean.
  """
  (r, c), (other_r, other_c) = discs(ink)
  across = other_r - r, other_c - c
  back = -across[0], -across[1]
  turns = _turn(ink, (r, c), across), _turn(ink, (other_r, other_c), back)
  return Seen(across, turns)


def discs(ink: np.ndarray) -> list[tuple[int, int]]:
  """Middles of the squares of 3 × 3 pixels that are all ink, by rows."""
  squares = np.lib.stride_tricks.sliding_window_view(ink, (3, 3))
  return [(r + 1, c + 1) for r, c in np.argwhere(squares.all((2, 3))).tolist()]


def _turn(
  ink: np.ndarray, disc: tuple[int, int], towards: tuple[int, int]
) -> int:
  """Eighths of a turn from a direction to that in which the path leaves a disc."""
  # The next dash begins three pixels from the middle, where nothing else can be.
  top, left = (max(0, x - 3) for x in disc)
  near = ink[top : disc[0] + 4, left : disc[1] + 4]
  for r, c in np.argwhere(near).tolist():
    down, right = r + top - disc[0], c + left - disc[1]
    if max(abs(down), abs(right)) == 3:
      turn = math.atan2(down, right) - math.atan2(*towards)
      eighths = round(turn / (math.pi / 4)) % 8
      return min(eighths, 8 - eighths)
  raise ValueError(f"no path leaves the disc at {disc}")


def examples(task: Task, batch: Batch) -> Iterator[tuple[Seen, int]]:
  """Pictures and their answers."""
  size = math.isqrt(batch["source"].shape[1] - 1)
  pictures = batch["source"][:, 1:].reshape(-1, size, size)
  for ids, answer in zip(pictures, batch["targets"][:, 0], strict=True):
    yield seen(ids == pathfinder.INK), int(answer)
