"""Pathfinder: answers by a search over pixels, balance, sizes, and what has no room."""

import itertools
import zlib

import numpy as np
import pytest

from projects.pathfinder import task as pathfinder
from projects.pathfinder.task import PathfinderConfig
from tasks import draws
from tests.tasks.generated_cases import assert_refused, make, rows


def picture(symbols):
  """Pixels as booleans, [size, size]."""
  assert symbols[0] == "<cls>"
  size = round((len(symbols) - 1) ** 0.5)
  assert set(symbols[1:]) == {".", "#"}
  return np.array([s == "#" for s in symbols[1:]]).reshape(size, size)


def discs(pixels):
  """Middles of the 3 × 3 squares that are all ink."""
  size = len(pixels)
  inside = range(1, size - 1)
  return [
    (r, c)
    for r, c in itertools.product(inside, inside)
    if pixels[r - 1 : r + 2, c - 1 : c + 2].all()
  ]


def reached(pixels, start):
  """Every pixel of ink that steps of at most two, from ink to ink, get to."""
  seen, waiting = {start}, [start]
  while waiting:
    r, c = waiting.pop()
    for down, right in itertools.product(range(-2, 3), repeat=2):
      to = r + down, c + right
      inside = all(0 <= x < len(pixels) for x in to)
      if inside and pixels[to] and to not in seen:
        seen.add(to)
        waiting.append(to)
  return seen


@pytest.mark.parametrize(
  "sizes",
  [
    {"size": 32, "num_dashes": 6, "num_distractors": 6},
    {"size": 32, "num_dashes": 14, "num_distractors": 4},
    {"size": 16, "num_dashes": 4, "num_distractors": 1},
    {"size": 20, "num_dashes": 3, "num_distractors": 0},
  ],
)
def test_a_search_from_one_disc_finds_the_other_where_the_answer_is_yes(sizes):
  task = make("pathfinder", batch_size=40, **sizes)
  short = max(2, sizes["num_dashes"] // 3)
  expected = sorted([2 * sizes["num_dashes"]] * 2)
  expected += [2 * short] * sizes["num_distractors"]
  for symbols, answers in rows(task, task.train_batch(1)):
    pixels = picture(symbols)
    first, second = discs(pixels)
    found = reached(pixels, first)
    assert answers == {0: "yes" if second in found else "no"}
    # Nothing is there beside the paths, and each is as long as it was asked for:
    # a disc is seven or eight pixels on a path that had one or two there.
    left = {tuple(place) for place in np.argwhere(pixels)}
    lengths = []
    while left:
      part = reached(pixels, next(iter(left)))
      left -= part
      for r, c in (first, second):
        if (r, c) in part:
          block = itertools.product((r - 1, r, r + 1), (c - 1, c, c + 1))
          part = (part - set(block)) | {(r, c), (r, c, "next")}
      lengths.append(len(part))
    assert len(lengths) == len(expected)
    assert sorted(lengths) == sorted(expected)


def test_the_answer_cannot_be_told_from_the_discs():
  task = make("pathfinder", batch_size=40)
  pictures = [
    picture(symbols) for symbols, _ in rows(task, task.train_batch(0))
  ]
  for one, other in zip(pictures[::2], pictures[1::2], strict=True):
    assert discs(one) == discs(other)
    assert one.sum() == other.sum()
    assert (one != other).any()


def test_a_path_has_as_many_forms_from_its_end_as_from_its_start():
  # Between two dashes lies half a step along each of them.
  size, found = 40, set()
  draw = draws.stream(draws.split_key(0, "train"), 0)
  for _ in range(2000):
    path, _ = pathfinder._path(
      draw, size, 3, 0, True, pathfinder._End(20 * size + 20, next(draw) % 8)
    )
    places = [divmod(pixel, size) for pixel in path]
    found.add(tuple((r - 20, c - 20) for r, c in places))
  backwards = set()
  for path in found:
    end_r, end_c = path[-1]
    backwards.add(tuple((r - end_r, c - end_c) for r, c in reversed(path)))
  assert len(found) == 8 * 3 * 3
  assert backwards == found


def test_as_many_are_yes_as_no_and_neighbours_do_not_tell():
  task = make("pathfinder", batch_size=400)
  answers = task.train_batch(0)["targets"][:, 0]
  values, counts = np.unique(answers, return_counts=True)
  assert task.labels(values) == ["no", "yes"]
  assert counts.tolist() == [200, 200]
  first_of_two = answers[::2] == values[1]
  assert 70 < first_of_two.sum() < 130


def test_a_picture_that_is_hard_to_draw_does_not_stop_the_training():
  task = make(
    "pathfinder", size=12, num_dashes=3, num_distractors=0, batch_size=8
  )
  # The fourth pair needs more than the 1,000 tries that the first one is given.
  assert not any(itertools.islice(task._tries("train", 3), 1000))
  assert len(list(rows(task, task.train_batch(0)))) == 8


def test_what_has_no_room_is_told_before_anything_begins():
  with pytest.raises(ValueError, match=r"^task.size: none of 1000 pictures of"):
    make("pathfinder", size=9, num_dashes=6, num_distractors=6)


def test_faults():
  assert_refused(
    PathfinderConfig,
    *({"size": 7}, {"size": 257}, {"num_dashes": 2}, {"num_distractors": -1}),
  )
  for fields in ({"size": 8}, {"size": 256}, {"num_dashes": 3}):
    assert PathfinderConfig(**fields) is not None


def test_a_seed_keeps_its_pictures():
  # A run of an earlier version goes on with these, of raw words of Philox.
  task = make("pathfinder", size=16, num_dashes=4, seed=3, batch_size=9)
  batches = (task.train_batch(1), *task.eval_batches("validation"))
  digest = 0
  for batch in batches[:3]:
    for name in ("source", "targets"):
      digest = zlib.crc32(batch[name].tobytes(), digest)
  assert digest == 4273597990


def test_a_typed_picture_is_read_as_one_of_a_batch():
  task = make("pathfinder")
  source = task.train_batch(0)["source"][0]
  line = " ".join(task.labels(source[1:]))
  assert task.encode(line) == source.tolist()
