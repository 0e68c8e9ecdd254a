"""Numbers for a reader."""

from collections.abc import Callable, Sequence
import math
import statistics

from training.metrics import format_number

# Two-sided 95 % of Student's t, by degrees of freedom 1 … 10.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def half_interval(values: Sequence[float]) -> float | None:
  """Half the 95 % interval of their mean (Student's t); None for one value."""
  if len(values) < 2:
    return None
  freedom = len(values) - 1
  # Beyond the table, the first terms of the expansion around the normal's.
  beyond = 1.96 + 2.372 / freedom + 2.82 / freedom**2 + 2.56 / freedom**3
  t = _T[freedom - 1] if freedom <= len(_T) else beyond
  return t * statistics.stdev(values) / math.sqrt(len(values))


def ends(
  values: Sequence[float], highest: float = math.inf
) -> tuple[float, float] | None:
  """The 95 % interval of their mean, within 0 and `highest`; None for one.

  Student's t knows no bounds, and near one it goes beyond what the mean of any
  number of seeds could be. That part of it is cut off.

  Args:
    values: none of them below 0 or above `highest`.
    highest: that a value can be; an accuracy has 1.
  """
  mean, half = statistics.fmean(values), half_interval(values)
  if half is None:
    return None
  return max(mean - half, 0.0), min(mean + half, highest)


def interval(values: Sequence[float], highest: float = math.inf) -> str:
  """`mean ± half the 95 % interval`, or `mean [low, high]` where it is cut.

  The mean alone for one value.
  """
  mean = statistics.fmean(values)
  text = format_number(mean)
  is_fixed = text == f"{mean:.4f}"
  return _shown(
    text,
    values,
    highest,
    lambda value: f"{value:.4f}" if is_fixed else format_number(value),
  )


def short_interval(values: Sequence[float], highest: float = math.inf) -> str:
  """The same with three digits of the mean; it alone where all are equal."""
  mean = statistics.fmean(values)
  digits = _decimals(mean)
  text = _fixed(mean, digits)
  if not half_interval(values):
    return text
  return _shown(text, values, highest, lambda value: _fixed(value, digits))


def _shown(
  text: str,
  values: Sequence[float],
  highest: float,
  write: Callable[[float], str],
) -> str:
  """The text of a mean, and its interval after it."""
  mean, half = statistics.fmean(values), half_interval(values)
  cut = ends(values, highest)
  if half is None or cut is None:
    return text
  if cut == (mean - half, mean + half):
    return f"{text} ± {write(half)}"
  return f"{text} [{', '.join(map(write, cut))}]"


def _decimals(value: float) -> int:
  """Decimals that show three digits of a value."""
  if value == 0:
    return 0
  return min(6, max(0, 2 - math.floor(math.log10(abs(value)))))


def _fixed(value: float, decimals: int) -> str:
  return f"{value:,.{decimals}f}"


def compact(value: float) -> str:
  """At most five digits, none of them a trailing zero."""
  return f"{value:.5g}"
