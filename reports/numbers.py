"""Numbers for a reader."""

from collections.abc import Callable, Sequence
import math
import statistics

from scipy import special

from training.metrics import format_number

TIED = "≈"
"""Stands behind means that cannot be told apart from the best one."""

SHARED = "*"
"""Stands behind times of runs that shared their machine."""


def half_interval(values: Sequence[float]) -> float | None:
  """Half the 95 % interval of their mean (Student's t); None for one value."""
  if len(values) < 2:
    return None
  return _student(len(values) - 1) * _error(values)


def ends(
  values: Sequence[float], highest: float = math.inf
) -> tuple[float, float] | None:
  """The 95 % interval of their mean, within 0 and `highest`; None for one.

  Of a share p = mean / highest it is Student's t on the logit scale, where the
  standard error of the mean is divided by the slope p (1 − p):

    logit(p) ± t · s / (√n · highest · p · (1 − p))

  which never leaves the range, holds the mean, and is the common interval where
  that is far from both ends. Near an end it is wider: of three shares drawn from
  Beta(9, 1) it holds the true mean in 95 % of cases, and the common one, cut at 1, in
  90 % (tested). Of numbers without a bound it is the common one, cut at 0.

  Args:
    values: none of them below 0 or above `highest`.
    highest: that a value can be; an accuracy has 1.
  """
  mean, half = statistics.fmean(values), half_interval(values)
  if half is None:
    return None
  if math.isinf(highest):
    return max(mean - half, 0.0), mean + half
  share = mean / highest
  if half == 0.0 or not 0.0 < share < 1.0:
    return mean, mean
  middle = math.log(share / (1.0 - share))
  half /= highest * share * (1.0 - share)
  low, high = (_share(middle + x) * highest for x in (-half, half))
  return low, high


def can_be_told_apart(
  values: Sequence[float],
  others: Sequence[float],
  highest: float = math.inf,
) -> bool | None:
  """Whether two means differ by Welch's t-test at 5 %; None with one value.

  Means of shares are compared on the logit scale, as `ends` does, where none of
  them is at an end.
  """
  if min(len(values), len(others)) < 2:
    return None
  means = [statistics.fmean(x) for x in (values, others)]
  errors = [_error(x) for x in (values, others)]
  if all(0.0 < mean < highest for mean in means) and math.isfinite(highest):
    shares = [mean / highest for mean in means]
    slopes = [highest * share * (1.0 - share) for share in shares]
    errors = [e / slope for e, slope in zip(errors, slopes, strict=True)]
    means = [math.log(share / (1.0 - share)) for share in shares]
  squares = [error**2 for error in errors]
  difference = abs(means[0] - means[1])
  if not any(squares):
    return difference > 0.0
  # Welch and Satterthwaite.
  sizes = len(values) - 1, len(others) - 1
  parts = [x**2 / n for x, n in zip(squares, sizes, strict=True)]
  freedom = sum(squares) ** 2 / sum(parts)
  return difference > _student(freedom) * math.sqrt(sum(squares))


def _error(values: Sequence[float]) -> float:
  """Standard error of their mean."""
  return statistics.stdev(values) / math.sqrt(len(values))


def _student(freedom: float) -> float:
  """Two-sided 95 % of Student's t."""
  return float(special.stdtrit(freedom, 0.975))


def _share(logit: float) -> float:
  """1 / (1 + e^−x), of any x."""
  small = math.exp(-abs(logit))
  return (1.0 if logit >= 0.0 else small) / (1.0 + small)


def interval(values: Sequence[float], highest: float = math.inf) -> str:
  """`mean ± half the 95 % interval`, or `mean [low, high]` where it is not even.

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
  found = ends(values, highest)
  if half is None or found is None:
    return text
  low, high = map(write, found)
  if (low, high) == (write(mean - half), write(mean + half)):
    return f"{text} ± {write(half)}"
  return f"{text} [{low}, {high}]"


def _decimals(value: float) -> int:
  """Decimals that show three digits of a value."""
  if value == 0:
    return 0
  return min(6, max(0, 2 - math.floor(math.log10(abs(value)))))


def _fixed(value: float, decimals: int) -> str:
  return f"{value:,.{decimals}f}"


def by_size(text: str) -> tuple[float, str]:
  """Sorts texts that are numbers by their value, before all other texts."""
  try:
    return (float(text), text)
  except ValueError:
    return (math.inf, text)


def compact(value: float) -> str:
  """At most five digits, none of them a trailing zero."""
  return f"{value:.5g}"
