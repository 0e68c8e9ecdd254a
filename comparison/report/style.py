"""The style of all figures: each mechanism has a fixed colour, dash and marker."""

from collections.abc import Generator, Iterable, Mapping
import contextlib
from typing import Any, NamedTuple
import warnings

import matplotlib
from matplotlib import colors

from attention import ATTENTIONS


class Style(NamedTuple):
  """The style of a mechanism: arguments of `Axes.plot`."""

  color: str
  linestyle: Any
  marker: str


# From a search: any two colours differ by at least 9 in OKLab (× 100), for normal
# vision and three kinds of colour blindness; all have a contrast of 3 : 1 on white.
_COLORS = (
  *("#000000", "#003fb6", "#a44903", "#639600", "#b951bf", "#1d97ff"),
  *("#e1756e", "#1d7887", "#690b6e", "#a28eae", "#664e50"),
)
_DASHES = (
  *("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.2, 1, 1.2))),
  (0, (5, 1.2, 1, 1.2, 1, 1.2)),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", "*", ">", "d", "x", "+")
MUTED = "#8a8a8a"


def styles(attentions: Iterable[str]) -> dict[str, Style]:
  """Maps each mechanism to its style, which is the same in every figure.

  The n-th mechanism of `ATTENTIONS` has the n-th style. There are 11 colours, with a
  new dash after each cycle of them, and 13 markers, so no two of the first 55 styles
  share colour and dash, and no two of the first 143 share colour and marker. Variants
  follow, sorted by name.
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


def make_row_styles(
  base: Mapping[str, Style], rows: Iterable[tuple[str, str]]
) -> dict[str, Style]:
  """Maps the names of rows to styles that differ between rows of one mechanism.

  The first row of a mechanism has the mechanism's style; the others have its colour,
  mixed with white or black, and other dashes and markers.

  Args:
    base: maps mechanisms to their styles.
    rows: name and mechanism of each row.
  """
  counts: dict[str, int] = {}
  result: dict[str, Style] = {}
  for name, attention in rows:
    if name in result:
      continue
    n = counts[attention] = counts.get(attention, -1) + 1
    style = base[attention]
    if n:
      style = Style(
        _mix(style.color, n),
        _DASHES[(_DASHES.index(style.linestyle) + n) % len(_DASHES)],
        _MARKERS[(_MARKERS.index(style.marker) + n) % len(_MARKERS)],
      )
    result[name] = style
  return result


def _mix(color: str, n: int) -> str:
  """Mixes a dark colour with white, or a light one with black."""
  red, green, blue = colors.to_rgb(color)
  end = 1.0 if 0.299 * red + 0.587 * green + 0.114 * blue < 0.35 else 0.0
  share = 0.45 if n % 2 else 0.25
  red, green, blue = ((1 - share) * x + share * end for x in (red, green, blue))
  return colors.to_hex((red, green, blue))


@contextlib.contextmanager
def look() -> Generator[None]:
  """A context manager with Matplotlib's settings for drawing and saving figures."""
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
    # Equal numbers give equal files.
    "svg.hashsalt": "comparison",
    # Tokens and reasons are plain text, even with dollar signs.
    "text.parse_math": False,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
  }
  with matplotlib.rc_context(settings), warnings.catch_warnings():
    # A token without a glyph becomes a box in PNG; SVG keeps its text.
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
    yield
