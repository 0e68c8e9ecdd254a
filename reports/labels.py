"""Names next to lines and points, moved until no two are on top of each other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reports import packing

Finish = Callable[[], None]
"""What is to be done when the layout of the figure is known."""

_LINE_HEIGHT = 1.25
_SIZE = 7.5
_MARGIN = 14  # Points between a panel and the names at its right.


class Label(NamedTuple):
  """A name and the place in data that it belongs to."""

  text: str
  x: float
  y: float
  color: str


def ends(axes: Any, labels: Sequence[Label]) -> Finish:
  """Names at the right of the panel, a thin line from each to its curve's end.

  Args:
    axes: of matplotlib, the curves drawn.
    labels: the last point of each curve.

  Returns:
    Moves them apart; to be called when the layout is known.
  """
  from matplotlib.transforms import ScaledTranslation

  figure = axes.figure
  shift = ScaledTranslation(_MARGIN / 72, 0, figure.dpi_scale_trans)
  texts = [
    axes.text(
      1,
      0.5,
      label.text,
      transform=axes.transAxes + shift,
      va="center",
      fontsize=_SIZE,
      color=label.color,
    )
    for label in labels
  ]

  def spread() -> None:
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [to_axes.transform((label.x, label.y)) for label in labels]
    width, height = (
      pixels * 72 / figure.dpi for pixels in (axes.bbox.width, axes.bbox.height)
    )
    apart = packing.spaced(
      [float(y) for _, y in places], _LINE_HEIGHT * _SIZE / height
    )
    for label, text, (x, y), at in zip(
      labels, texts, places, apart, strict=True
    ):
      text.set_y(at)
      axes.plot(
        [x, 1, 1 + (_MARGIN - 2) / width],
        [y, y, at],
        transform=axes.transAxes,
        color=label.color,
        linewidth=0.5,
        linestyle=(0, (1, 1.5)),
        alpha=0.8,
        clip_on=False,
        scalex=False,
        scaley=False,
      )

  return spread


def points(
  axes: Any, labels: Sequence[Label], halves: Sequence[float]
) -> Finish:
  """Names next to points, where they cover no point, bar or other name.

  Args:
    axes: of matplotlib, the points drawn.
    labels: where the points are.
    halves: how far the bar of each goes up and down, in data.

  Returns:
    Draws them; to be called when the layout is known.
  """

  def place() -> None:
    figure = axes.figure
    renderer = figure.canvas.get_renderer()
    scale = figure.dpi / 72
    dots = [axes.transData.transform((one.x, one.y)) for one in labels]
    taken = [packing.box(x, y, 8 * scale, 8 * scale) for x, y in dots]
    for label, half in zip(labels, halves, strict=True):
      bar = [
        axes.transData.transform((label.x, label.y + end))
        for end in (-half, half)
      ]
      (x, low), (_, high) = bar
      taken.append((x - scale, low, x + scale, high))
    frame = axes.get_window_extent(renderer)
    for label, (x, y) in zip(labels, dots, strict=True):
      text = axes.annotate(
        label.text,
        (label.x, label.y),
        xytext=(0, 0),
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=_SIZE,
        color=label.color,
        arrowprops={
          "arrowstyle": "-",
          "color": label.color,
          "linewidth": 0.5,
          "alpha": 0.7,
          "shrinkA": 0,
          "shrinkB": 2,
        },
      )
      size = text.get_window_extent(renderer)
      offsets = packing.offsets(size.width, size.height, scale)
      boxes = [
        packing.box(x + u, y + v, size.width, size.height) for u, v in offsets
      ]
      costs = [packing.overlap(box, taken, frame) for box in boxes]
      chosen = costs.index(min(costs))
      u, v = offsets[chosen]
      text.set_position((u / scale, v / scale))
      taken.append(boxes[chosen])

  return place
