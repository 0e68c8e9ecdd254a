"""Pathfinder: does a dashed path connect two discs? The input is a pixel sequence.

    . . . . . . . . # # . .
    . # # # . . . . . . . .       Two long paths and several short ones; two ends
    . # # # . . . . . . . .       are marked by discs of 3 × 3 pixels. Here they
    . # # # . # . . . . . .       are the ends of one path: yes.
    . . . . . . # . # # # .
    . . . . . . . . # # # .
    . # . . . . . . # # # .
    . . # . . . . . . . . .

After Linsley et al. 2018, arXiv:1805.08315, with the 32 × 32 pixels of Long Range
Arena, Tay et al., arXiv:2011.04006. This module draws different pictures: paths are one
pixel wide, dashes lie along the eight directions of the grid, dashes of a path are one
pixel apart, and paths are at least two pixels apart. So the picture determines the
answer. The discs do not: for each picture with the answer yes, there is one with the
answer no that has the same two discs and the same dashes next to them. A rule that uses
only the discs is right in 50 % of the pictures, and a rule that also uses where paths
leave them in 63 %.
"""

from collections.abc import Iterable, Iterator
import functools
import itertools
import operator
from typing import Annotated, NamedTuple

from annotated_types import Ge, Interval
import numpy as np
from pydantic.dataclasses import dataclass

from settings.fields import STRICT, Count, Whole
from tasks import draws
from tasks.generated import FIRST_SYMBOL, Classified, maker

PAPER, INK, NO, YES = range(FIRST_SYMBOL + 1, FIRST_SYMBOL + 5)
_DIRECTIONS = (
  (0, 1),
  (1, 1),
  (1, 0),
  (1, -1),
  (0, -1),
  (-1, -1),
  (-1, 0),
  (-1, 1),
)
_TURNS = (
  (-1, 0, 1),
  (-1, 1, 0),
  (0, -1, 1),
  (0, 1, -1),
  (1, -1, 0),
  (1, 0, -1),
)
_PATH_TRIES, _TRIES = 100, 1000


@dataclass(frozen=True, config=STRICT)
class PathfinderConfig:
  """The size of a picture, and the number and length of its paths.

  Attributes:
    size: side of a picture in pixels; the sequence has size² pixels and one token for
      the answer.
    num_dashes: number of dashes of each of the two long paths.
    num_distractors: number of short paths, which have a third as many dashes, at
      least two.
    train_size: number of training pictures, which are repeated; 0 means that every
      picture is new.
    eval_size: number of held-out pictures.
  """

  size: Annotated[int, Interval(ge=8, le=256)] = 32
  num_dashes: Annotated[int, Ge(3)] = 6
  num_distractors: Whole = 6
  train_size: Whole = 0
  eval_size: Count = 2000


class _Pair(NamedTuple):
  """Two pictures with the same discs, as ids of pixels, and their order."""

  yes: np.ndarray
  no: np.ndarray
  is_first_yes: bool


class PathfinderTask(Classified):
  """Pictures as sequences of pixels, with the answer yes or no.

  The pixels are in row-major order. One of two neighbouring examples is yes, so the
  answers are balanced.
  """

  def __init__(self, config: PathfinderConfig, *, batch_size: int, seed: int):
    super().__init__(
      config,
      [".", "#", "no", "yes"],
      batch_size=batch_size,
      seed=seed,
      length=config.size**2,
    )
    # Raises an error now, not during training, if the paths do not fit.
    if not any(itertools.islice(self._tries("train", 0), _TRIES)):
      raise ValueError(
        f"task.size: none of {_TRIES} pictures of {config.size} × {config.size} "
        f"has room for two paths of num_dashes={config.num_dashes} and "
        f"num_distractors={config.num_distractors}"
      )

  def _ids_and_answers(
    self, split: str, indices: np.ndarray
  ) -> Iterator[tuple[np.ndarray, int]]:
    pairs = {n: self._pair(split, n) for n in np.unique(indices // 2).tolist()}
    for index in indices.tolist():
      pair = pairs[index // 2]
      is_yes = pair.is_first_yes == (index % 2 == 0)
      yield (pair.yes, YES) if is_yes else (pair.no, NO)

  def _pair(self, split: str, number: int) -> _Pair:
    """Two neighbouring examples, one of each answer, with the same discs."""
    return next(filter(None, self._tries(split, number)))

  def _tries(self, split: str, number: int) -> Iterator[_Pair | None]:
    """Yields an infinite stream of pairs, or None for a pair that does not fit."""
    config = self._config
    key = draws.split_key(self._seed, split)
    # Decides which of the two is yes; pictures use other words of the stream.
    order = draws.words(key, np.array([2**40 + number]), 1)[0, 0]
    words = draws.stream(key, number)
    while True:
      yes = _paths(words, config)
      if yes is None:
        yield None
        continue
      ends = _ends(config.size, yes.first)
      no = _paths(words, config, ends)
      if no is None:
        yield None
        continue
      yield _Pair(
        _pixels(config.size, yes.ink, ends),
        _pixels(config.size, no.ink, ends),
        bool(order % 2),
      )


class _Board(NamedTuple):
  """Neighbourhoods of pixels; pixel (r, c) has the number r · size + c.

  Attributes:
    discs: for each pixel the 3 × 3 pixels centred at it; empty at the edge.
    near: for each pixel the pixels at most two rows and columns away, as bits of an
      integer.
  """

  discs: list[list[int]]
  near: list[int]


@functools.cache
def _board(size: int) -> _Board:
  def square(pixel: int, radius: int) -> list[int]:
    row, column = divmod(pixel, size)
    rows = range(max(0, row - radius), min(size, row + radius + 1))
    columns = range(max(0, column - radius), min(size, column + radius + 1))
    return [r * size + c for r in rows for c in columns]

  discs = [square(pixel, 1) for pixel in range(size**2)]
  return _Board(
    [disc if len(disc) == 9 else [] for disc in discs],
    [_bits(square(pixel, 2)) for pixel in range(size**2)],
  )


def _bits(pixels: list[int]) -> int:
  return sum(1 << pixel for pixel in pixels)


def _union(sets: Iterable[int]) -> int:
  return functools.reduce(operator.or_, sets, 0)


class _End(NamedTuple):
  """The start of a path: its pixel, and the direction of its first dash."""

  pixel: int
  heading: int


class _Paths(NamedTuple):
  """The pixels of the first long path, in order, and the pixels of all paths."""

  first: list[int]
  ink: list[int]


def _paths(
  words: Iterator[int],
  config: PathfinderConfig,
  starts: tuple[_End, ...] = (),
) -> _Paths | None:
  """Draws all paths of a picture; None if one does not fit.

  Args:
    words: random words.
    config: config of the task.
    starts: starts of the two long paths; random by default.
  """
  blocked, first, ink = 0, [], []
  short = max(2, config.num_dashes // 3)
  sizes = [config.num_dashes] * 2 + [short] * config.num_distractors
  for number, size in enumerate(sizes):
    is_long = number < 2
    start = starts[number] if number < len(starts) else None
    for _ in range(_PATH_TRIES):
      candidate = _path(words, config.size, size, blocked, is_long, start)
      if candidate is not None:
        break
    else:
      return None
    path, near = candidate
    blocked |= near
    first = first or path
    ink += path
  return _Paths(first, ink)


def _ends(size: int, path: list[int]) -> tuple[_End, _End]:
  """Both ends of a path, each as a possible start."""

  def end(dash: list[int]) -> _End:
    (r, c), (next_r, next_c) = (divmod(pixel, size) for pixel in dash)
    return _End(dash[0], _DIRECTIONS.index((next_r - r, next_c - c)))

  return end(path[:2]), end(path[:-3:-1])


def _path(
  words: Iterator[int],
  size: int,
  num_dashes: int,
  blocked: int,
  has_discs: bool,
  start: _End | None,
) -> tuple[list[int], int] | None:
  """Draws one path by a random walk; None if it does not fit.

  Args:
    words: random words.
    size: size of the picture.
    num_dashes: number of dashes of the path.
    blocked: bits of pixels that are too close to other paths.
    has_discs: whether discs must fit at both ends.
    start: start of the path; None means a random one.

  Returns:
    The pixels of the path in order, and the bits of pixels that are too close to it.
  """
  board = _board(size)
  first, heading = start or (next(words) % size**2, next(words) % 8)
  row, column = divmod(first, size)
  path: list[int] = []
  near: list[int] = []  # One entry per dash.
  for number in range(num_dashes):
    too_close = blocked | _union(near[:-1])
    for turn in _TURNS[next(words) % 6] if number else (0,):
      new_heading = (heading + turn) % 8
      r, c = row, column
      if number:
        # Half of the step to the next dash is along each of the two headings, so that
        # a path is symmetric under reversal.
        r += _DIRECTIONS[heading][0] + _DIRECTIONS[new_heading][0]
        c += _DIRECTIONS[heading][1] + _DIRECTIONS[new_heading][1]
      ends = r + _DIRECTIONS[new_heading][0], c + _DIRECTIONS[new_heading][1]
      if not all(0 <= x < size for x in (r, c, *ends)):
        continue
      dash = [r * size + c, ends[0] * size + ends[1]]
      if not too_close & _bits(dash):
        break
    else:
      return None
    path += dash
    near.append(board.near[dash[0]] | board.near[dash[1]])
    (row, column), heading = ends, new_heading
  near_path = _union(near)
  if has_discs:
    for end, others in ((path[0], near[2:]), (path[-1], near[:-2])):
      disc, too_close = board.discs[end], blocked | _union(others)
      if not disc or too_close & _bits(disc):
        return None
      near_path |= _union(board.near[pixel] for pixel in disc)
  return path, near_path


def _pixels(size: int, ink: list[int], ends: tuple[_End, _End]) -> np.ndarray:
  """Ids of the pixels of a picture with discs at both ends, [size²]."""
  ids = np.full(size**2, PAPER, np.int32)
  ids[ink] = INK
  for end in ends:
    ids[_board(size).discs[end.pixel]] = INK
  return ids


make = maker("pathfinder", PathfinderTask, "encoder")
