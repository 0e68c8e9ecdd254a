"""Where names go so that no two are on top of each other: numbers alone.

`spaced` moves names along one axis; `offsets`, `box` and `overlap` choose a place
around a point. `reports.labels` draws with them.
"""

from collections.abc import Sequence
import itertools
from typing import Any

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in pixels."""


def spaced(heights: Sequence[float], gap: float) -> list[float]:
  """Heights moved as little as possible, in order, at least `gap` apart.

  They stay half a gap within [0, 1] as long as there is room.
  """
  order = sorted(range(len(heights)), key=lambda i: heights[i])
  low = [heights[i] - n * gap for n, i in enumerate(order)]
  # Isotonic regression by pooling: a falling pair becomes its mean.
  pools: list[list[float]] = []
  for height in low:
    pools.append([height])
    while len(pools) > 1 and _mean(pools[-2]) > _mean(pools[-1]):
      pools[-2:] = [pools[-2] + pools[-1]]
  bottom, top = gap / 2, 1 - gap * (len(heights) - 0.5)
  flat = [max(min(_mean(p), top), bottom) for p in pools for _ in p]
  placed = [0.0] * len(heights)
  for n, (index, height) in enumerate(zip(order, flat, strict=True)):
    placed[index] = height + n * gap
  return placed


def offsets(
  width: float, height: float, scale: float
) -> list[tuple[float, float]]:
  """Where a name may stand around its point, the nearest places first."""
  found = []
  for distance in (7, 14, 22, 34, 48):
    reach = distance * scale
    for side, level in itertools.product((1, -1, 0), (0, 1, -1)):
      if side or level:
        across = reach if not level or distance == 7 else reach / 2
        u = side * (width / 2 + across)
        found.append((u, level * (height / 2 + reach * (0.8 if side else 1))))
  return found


def box(x: float, y: float, width: float, height: float) -> Box:
  """A rectangle by its centre and size."""
  return (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def overlap(rectangle: Box, taken: Sequence[Box], frame: Any) -> float:
  """Area that a box shares with others, and what of it leaves the frame."""
  a, b, c, d = rectangle
  shared = sum(
    max(0.0, min(c, z) - max(a, x)) * max(0.0, min(d, w) - max(b, y))
    for x, y, z, w in taken
  )
  inside = max(0.0, min(c, frame.x1) - max(a, frame.x0))
  inside *= max(0.0, min(d, frame.y1) - max(b, frame.y0))
  return shared + (c - a) * (d - b) - inside


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)
