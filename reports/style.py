"""One look for all figures: a mechanism keeps its colour, marker and dash."""

from collections.abc import Generator, Iterable
import contextlib
import itertools
from typing import Any, NamedTuple

from reports import table


class Style(NamedTuple):
  """How a mechanism is drawn.

  Attributes:
    slot: number of its colour; what a page with another background looks up.
    color: on white.
    marker: matplotlib's name of its marker.
    glyph: the same as a character, for tables.
    dash: matplotlib's name of its line.
  """

  slot: int
  color: str
  marker: str
  glyph: str
  dash: Any


# (on white, on near-black). Found by search: under normal vision and the three
# kinds of colour blindness any two are at least 9 apart in OKLab (× 100), and
# all have 3 : 1 of contrast, so that names next to lines can take them as well.
PALETTE = (
  ("#000000", "#ffffff"),
  ("#a28eae", "#b4a68b"),
  ("#003fb6", "#5a54f9"),
  ("#1d97ff", "#50e4fe"),
  ("#1d7887", "#379aba"),
  ("#639600", "#a2da01"),
  ("#e1756e", "#ffc7a7"),
  ("#a44903", "#e36709"),
  ("#b951bf", "#f566ff"),
  ("#690b6e", "#a92bb5"),
  ("#664e50", "#7d6e66"),
)
# Neighbours in the order of mechanisms differ in marker and dash as well.
_MARKERS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*", "d")
_GLYPHS = "●■▲▼◆✚✖◀▶★♦"
_DASHES = ("-", "--", "-.", (0, (1, 1.2)))
MUTED = "#808080"


def styles(labels: Iterable[str]) -> dict[str, Style]:
  """Label -> its style; mechanisms keep theirs in every comparison.

  Variants take the colours that are left over; when none are, they begin
  again with other markers.
  """
  ordered = table.ordered(labels)
  known = [label for label in ordered if label in table.MECHANISMS]
  slots = {label: table.MECHANISMS.index(label) for label in known}
  left = (n for n in itertools.count() if n not in slots.values())
  slots |= {label: next(left) for label in ordered if label not in slots}
  return {label: _style(slots[label]) for label in ordered}


def _style(slot: int) -> Style:
  color, round_ = slot % len(PALETTE), slot // len(PALETTE)
  mark = (slot + round_) % len(_MARKERS)
  dash = _DASHES[(slot + round_) % len(_DASHES)]
  return Style(color, PALETTE[color][0], _MARKERS[mark], _GLYPHS[mark], dash)


@contextlib.contextmanager
def look(salt: str) -> Generator[None]:
  """Matplotlib's settings while a figure is drawn and saved.

  Args:
    salt: keeps ids in SVG files the same from run to run, and apart between
      figures that share a page.
  """
  # Takes seconds to import, so only where something is drawn.
  import matplotlib

  settings = {
    "axes.grid": True,
    "axes.grid.which": "major",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.linewidth": 0.6,
    "axes.labelsize": 8,
    "font.size": 8,
    "grid.color": MUTED,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": salt,
    # Tokens and reasons are text, even with dollar signs.
    "text.parse_math": False,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
  }
  with matplotlib.rc_context(settings):
    yield
