"""Axes for numbers of any size: plain ticks, no powers of ten to decode."""

from collections.abc import Callable, Sequence
import math
from typing import Any

from reports import style

_WIDE = 6.0
_FEW_DECADES = 300.0
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_PREFIXES += ((1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


def scale(
  axes: Any, which: str, values: Sequence[float], unit: str = ""
) -> None:
  """A logarithmic axis where values differ much, else a linear one.

  Args:
    axes: of matplotlib.
    which: 'x' or 'y'.
    values: what it shows.
    unit: of the values; the ticks carry it with a prefix.
  """
  is_wide = min(values, default=0) > 0 and max(values) > _WIDE * min(values)
  if is_wide:
    axes.set(**{f"{which}scale": "log"})
  _ticks(axes, which, values, unit, is_logarithmic=is_wide)


def with_unit(value: float, unit: str) -> str:
  """`20 ms`, `1.5 GB`; a plain number where there is no unit."""
  if not unit:
    return f"{value:,.10g}"
  size = next((s for s, _ in _PREFIXES if abs(value) >= 0.9999 * s), 1.0)
  return f"{value / size:.4g} {dict(_PREFIXES)[size]}{unit}"


def against_length(
  axes: Any, lengths: Sequence[int], values: Sequence[float], unit: str
) -> None:
  """Both axes logarithmic, ticks at the lengths that were measured.

  Args:
    axes: of matplotlib.
    lengths: along x.
    values: along y.
    unit: of the values.
  """
  axes.set_yscale("log")
  at_places(axes, lengths, _length)
  _ticks(axes, "y", values, unit, is_logarithmic=True)


def at_places(
  axes: Any, places: Sequence[Any], write: Callable[[Any], str]
) -> None:
  """Makes x logarithmic, with ticks at places that were measured, six at most.

  Args:
    axes: of matplotlib.
    places: along x.
    write: text of a tick.
  """
  from matplotlib import ticker

  axes.set_xscale("log", base=2)
  kept = sorted(set(places))
  stride = -(-len(kept) // 6)
  ticks = kept[::-1][::stride][::-1]
  axes.set_xticks(ticks, [write(tick) for tick in ticks])
  axes.xaxis.set_minor_locator(ticker.NullLocator())


def doubling(axes: Any, values: Sequence[float]) -> None:
  """Makes x logarithmic, with ticks at powers of two where there are enough."""
  from matplotlib import ticker

  axes.set_xscale("log", base=2)
  if max(values) >= 4 * min(values):
    axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8))
  else:
    axes.xaxis.set_major_locator(ticker.MaxNLocator(5))
  axes.xaxis.set_minor_locator(ticker.NullLocator())
  axes.xaxis.set_major_formatter(
    ticker.FuncFormatter(lambda value, _: with_unit(value, ""))
  )


def limits(values: Sequence[float], highest: float) -> tuple[float, float]:
  """Ends of an axis that several panels share, so that they can be compared.

  Args:
    values: what the panels show.
    highest: that a value can be. What has such an end, as an accuracy, is shown
      from 0.
  """
  low, high = min(values, default=0.0), max(values, default=1.0)
  if math.isfinite(highest):
    low = 0.0
  margin = 0.04 * (high - low) or 1.0
  return low - margin, high + margin


def guides(axes: Any) -> None:
  """Grey lines that grow as T and T², from the lower left corner."""
  left, right = axes.get_xlim()
  low, high = axes.get_ylim()
  for power in (1, 2):
    axes.plot(
      [left, right],
      [low, low * (right / left) ** power],
      color=style.MUTED,
      linewidth=0.8,
      linestyle=(0, (1, 3)),
      zorder=0,
    )
  axes.set_xlim(left, right)
  axes.set_ylim(low, high)


def _ticks(
  axes: Any,
  which: str,
  values: Sequence[float],
  unit: str,
  *,
  is_logarithmic: bool,
) -> None:
  from matplotlib import ticker

  axis = {"x": axes.xaxis, "y": axes.yaxis}[which]
  if is_logarithmic:
    few = max(values) < _FEW_DECADES * min(values)
    subs = (1.0, 2.0, 5.0) if few else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs, numticks=9))
    axis.set_minor_formatter(ticker.NullFormatter())
  else:
    # Side by side, ticks with their unit need more room than one above the other.
    is_wide = bool(unit) and which == "x"
    axis.set_major_locator(ticker.MaxNLocator(3 if is_wide else 5))
  axis.set_major_formatter(
    ticker.FuncFormatter(lambda value, _: with_unit(value, unit))
  )


def _length(value: int) -> str:
  is_whole = value >= 1024 and value % 1024 == 0
  return f"{value // 1024}k" if is_whole else str(value)
