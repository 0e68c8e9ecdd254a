"""Numbers for a reader."""

from collections.abc import Sequence
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


def interval(values: Sequence[float]) -> str:
  """`mean ± half the 95 % interval`; the mean alone for one."""
  mean, half = statistics.fmean(values), half_interval(values)
  text = format_number(mean)
  if half is None:
    return text
  is_fixed = text == f"{mean:.4f}"
  return f"{text} ± {f'{half:.4f}' if is_fixed else format_number(half)}"


def short_interval(values: Sequence[float]) -> str:
  """The same with three digits of the mean; without ± where all are equal."""
  mean, half = statistics.fmean(values), half_interval(values)
  digits = _decimals(mean)
  text = _fixed(mean, digits)
  return f"{text} ± {_fixed(half, digits)}" if half else text


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
