"""A figure: panels that stand side by side in a file, and apart on a page."""

from collections.abc import Callable, Generator, Iterable, Mapping
import contextlib
import io
import math
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
import warnings

from reports import marks, style, svg
from reports.labels import Finish

_DPI = 150

Panel = Callable[[Any], Finish | None]
"""Draws on axes; what it returns, if anything, waits for the layout."""


class Figure(NamedTuple):
  """What is drawn, and how large.

  Attributes:
    stem: name of its files.
    caption: what is to be seen.
    panels: name -> panel.
    columns: panels in a row, in the file.
    size: inches of a panel.
    mechanisms: name of a panel -> the mechanism that it shows alone.
  """

  stem: str
  caption: str
  panels: Mapping[str, Panel]
  columns: int = 2
  size: tuple[float, float] = (3.9, 2.9)
  mechanisms: Mapping[str, str] = MappingProxyType({})


def titled(title: str, panel: Panel) -> Panel:
  """The same panel with a title over it; as it is where that is empty."""

  def draw(axes: Any) -> Finish | None:
    axes.set_title(title)
    return panel(axes)

  return draw if title else panel


def save(folder: Path, figures: Iterable[Figure]) -> None:
  """Writes every figure as PNG and SVG, all panels in one file."""
  folder.mkdir(exist_ok=True)
  for figure in figures:
    with style.look(figure.stem):
      drawn = _drawn(figure, figure.panels.values())
      marks.remove(drawn)
      for kind in ("png", "svg"):
        # The date would make every file new.
        metadata = {"Date": None} if kind == "svg" else None
        _save(drawn, folder / f"{figure.stem}.{kind}", metadata=metadata)


def inline(figure: Figure) -> dict[str, str]:
  """Each panel as an `<svg>` element of a page; panel name -> markup."""
  found = {}
  for number, (name, panel) in enumerate(figure.panels.items()):
    unique = f"{figure.stem}-{number}"
    with style.look(unique):
      drawn = _drawn(figure._replace(columns=1), [panel])
      found[name] = svg.adapted(_svg(drawn), unique, f"{figure.stem}: {name}")
  return found


def _drawn(figure: Figure, panels: Iterable[Panel]) -> Any:
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure as Canvas
  from matplotlib.layout_engine import ConstrainedLayoutEngine

  layout = ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06)
  panels = list(panels)
  columns = min(figure.columns, len(panels))
  rows = math.ceil(len(panels) / columns)
  width, height = figure.size
  # Text is as wide when it is laid out as when it is saved.
  size = (columns * width, rows * height)
  drawn = Canvas(figsize=size, layout=layout, dpi=_DPI)
  FigureCanvasAgg(drawn)
  places = [*drawn.subplots(rows, columns, squeeze=False).flat]
  finishes = [panel(axes) for panel, axes in zip(panels, places, strict=False)]
  for axes in places[len(panels) :]:
    axes.set_axis_off()
  with _quiet():
    drawn.draw_without_rendering()
    drawn.set_layout_engine("none")  # It stays: once is enough.
    for finish in filter(None, finishes):
      finish()
  return drawn


def _save(drawn: Any, target: Any, **options: Any) -> None:
  with _quiet():
    drawn.savefig(target, dpi=_DPI, **options)


@contextlib.contextmanager
def _quiet() -> Generator[None]:
  """A token without a glyph is a box in PNG, and itself in SVG: no warning."""
  with warnings.catch_warnings():
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font")
    yield


def _svg(drawn: Any) -> bytes:
  target = io.BytesIO()
  _save(drawn, target, format="svg", transparent=True, metadata={"Date": None})
  return target.getvalue()
