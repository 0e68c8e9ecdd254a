"""Rules that read little of an example of Pathfinder."""

import numpy as np

from projects.pathfinder import rules as pathfinder_rules
from tests.benchmarks.test_rules import run, shares

PICTURE = """
. . . . . . . . . . . .
. # # # . . . . . . . .
. # # # . . . . . . . .
. # # # . # . . . . . .
. . . . . . # . # # # .
. . . . . . . . # # # .
. # . . . . . . # # # .
. . # . . . . . . . . .
"""


def test_the_discs_and_the_directions_in_which_paths_leave_are_seen():
  ink = np.array([line.split() for line in PICTURE.split("\n")[1:-1]]) == "#"
  assert pathfinder_rules.discs(ink) == [(2, 2), (5, 9)]
  assert pathfinder_rules.seen(ink) == pathfinder_rules.Seen(
    across=(3, 7), turns=(0, 0)
  )
  # The path of the second disc leaves upwards; the other disc is to the left.
  ink[4, 6], ink[2, 10] = False, True
  assert pathfinder_rules.seen(ink).turns == (0, 2)


def test_the_command():
  config, of = shares(run("--config=configs/pathfinder.py", "--examples=1200"))
  assert config.startswith("configs/pathfinder.py: size=32, num_dashes=")
  # Of two neighbours one is yes, and both have the same discs.
  assert of[0] == 50.0
  assert of[1] < 52
  assert of[2] < 80
