"""Which mechanism every artist of a panel belongs to, so that a page can hide it.

The mark is matplotlib's `gid`, which its SVG writes as the id of a group. Only
pages keep it (`reports.svg`): files are written without.
"""

from collections.abc import Generator, Sequence
import contextlib
from typing import Any

from reports import labels
from reports.labels import Finish, Label

PREFIX = "mechanism:"
"""What a gid begins with; the label of the mechanism follows."""

Named = tuple[str, Label]
"""A mechanism and the name that is drawn for it."""


@contextlib.contextmanager
def of(axes: Any, mechanism: str) -> Generator[None]:
  """Marks all that is drawn meanwhile as a mechanism's."""
  before = axes.get_children()
  yield
  for artist in _added(axes, before):
    _mark(artist, mechanism)


def ends(axes: Any, named: Sequence[Named]) -> Finish:
  """`labels.ends`, with names and lines that are marked."""
  with _each(axes, named):
    spread = labels.ends(axes, [label for _, label in named])
  return _marked(axes, named, spread)


def points(
  axes: Any, named: Sequence[Named], halves: Sequence[float]
) -> Finish:
  """`labels.points`, with names that are marked."""
  place = labels.points(axes, [label for _, label in named], halves)
  return _marked(axes, named, place)


def ticks(axis: Any, mechanisms: Sequence[str]) -> None:
  """Marks the ticks of an axis, with their names, one a mechanism."""
  for tick, mechanism in zip(axis.get_major_ticks(), mechanisms, strict=True):
    _mark(tick, mechanism)


def remove(figure: Any) -> None:
  """Takes all marks off a figure."""
  for artist in figure.findobj():
    for part in _parts(artist):
      if (part.get_gid() or "").startswith(PREFIX):
        part.set_gid(None)


def _marked(axes: Any, named: Sequence[Named], finish: Finish) -> Finish:
  def finish_and_mark() -> None:
    with _each(axes, named):
      finish()

  return finish_and_mark


@contextlib.contextmanager
def _each(axes: Any, named: Sequence[Named]) -> Generator[None]:
  """Marks what is drawn meanwhile: one artist for each name, in their order."""
  before = axes.get_children()
  yield
  added = _added(axes, before)
  for artist, (mechanism, _) in zip(added, named, strict=True):
    _mark(artist, mechanism)


def _added(axes: Any, before: Sequence[Any]) -> list[Any]:
  return [artist for artist in axes.get_children() if artist not in before]


def _mark(artist: Any, mechanism: str) -> None:
  for part in _parts(artist):
    part.set_gid(PREFIX + mechanism)


def _parts(artist: Any) -> list[Any]:
  """The artist, and the arrow of an annotation, which is not its child."""
  arrow = getattr(artist, "arrow_patch", None)
  return [artist] if arrow is None else [artist, arrow]
