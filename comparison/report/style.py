"""One look for all figures: a mechanism keeps its colour, dash and marker."""

from collections.abc import Generator, Iterable
import contextlib
from typing import Any, NamedTuple
import warnings

import matplotlib

from attention import ATTENTIONS


class Style(NamedTuple):
  """How a mechanism is drawn: arguments of `Axes.plot`."""

  color: str
  linestyle: Any
  marker: str


# Found by search: under normal vision and the three kinds of colour blindness any
# two are at least 9 apart in OKLab (× 100), and all have 3 : 1 of contrast on white.
_COLORS = (
  *("#000000", "#003fb6", "#a44903", "#639600", "#b951bf", "#1d97ff"),
  *("#e1756e", "#1d7887", "#690b6e", "#a28eae", "#664e50"),
)
_DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">", "d", "x", "+")
MUTED = "#8a8a8a"


def styles(attentions: Iterable[str]) -> dict[str, Style]:
  """Mechanism -> its style, the same in every figure.

  The n-th mechanism of the registry has the n-th style: with 11 colours, a dash
  for every round of them and 13 markers, no two of the first 44 share colour and
  dash, and none of the first 143 colour and marker. Variants follow by name.
  """
  mechanisms = list(ATTENTIONS)
  names = [*mechanisms, *sorted({*attentions} - {*mechanisms})]
  return {
    name: Style(
      _COLORS[n % len(_COLORS)],
      _DASHES[n // len(_COLORS) % len(_DASHES)],
      _MARKERS[n % len(_MARKERS)],
    )
    for n, name in enumerate(names)
  }


@contextlib.contextmanager
def look() -> Generator[None]:
  """Matplotlib's settings while a figure is drawn and saved."""
  settings = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "axes.linewidth": 0.6,
    "axes.labelsize": 8.5,
    "figure.titlesize": 10,
    "figure.titleweight": "bold",
    "font.size": 8.5,
    "grid.color": MUTED,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.fontsize": 7.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 4.5,
    # The same file for the same numbers.
    "svg.hashsalt": "comparison",
    # Tokens and reasons are text, even with dollar signs.
    "text.parse_math": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
  }
  with matplotlib.rc_context(settings), warnings.catch_warnings():
    # A token without a glyph is a box in PNG, and itself in SVG.
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
    yield
