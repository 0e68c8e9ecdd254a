"""Names beside lines and points, moved until no two are on top of each other."""

from collections.abc import Callable, Sequence
import itertools
from typing import Any, NamedTuple

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
    apart = spaced([float(y) for _, y in places], _LINE_HEIGHT * _SIZE / height)
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


def points(
  axes: Any, labels: Sequence[Label], halves: Sequence[float]
) -> Finish:
  """Names beside points, where they cover no point, bar or other name.

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
    taken = [_box(x, y, 8 * scale, 8 * scale) for x, y in dots]
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
      offsets = _offsets(size.width, size.height, scale)
      boxes = [_box(x + u, y + v, size.width, size.height) for u, v in offsets]
      costs = [_overlap(box, taken, frame) for box in boxes]
      chosen = costs.index(min(costs))
      u, v = offsets[chosen]
      text.set_position((u / scale, v / scale))
      taken.append(boxes[chosen])

  return place


def _offsets(
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


def _box(
  x: float, y: float, width: float, height: float
) -> tuple[float, float, float, float]:
  return (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _overlap(box: Any, taken: Sequence[Any], frame: Any) -> float:
  """Area that a box shares with others, and what of it leaves the frame."""
  a, b, c, d = box
  shared = sum(
    max(0.0, min(c, z) - max(a, x)) * max(0.0, min(d, w) - max(b, y))
    for x, y, z, w in taken
  )
  inside = max(0.0, min(c, frame.x1) - max(a, frame.x0))
  inside *= max(0.0, min(d, frame.y1) - max(b, frame.y0))
  return shared + (c - a) * (d - b) - inside


def _mean(values: Sequence[float]) -> float:
  return sum(values) / len(values)
