"""Computes exponents, crossovers and tables of rows of `benchmarks.scaling`."""

from collections.abc import Mapping, Sequence
import math

import numpy as np

from benchmarks.programs import BASELINE, DECODE, DENSE, PARTS
from benchmarks.timing import Row

Series = Mapping[int, float]
"""Length -> seconds or bytes."""


def table(rows: Sequence[Sequence[str]]) -> str:
  """Formats rows of cells as Markdown; the second row must be the rule."""
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def series(rows: Sequence[Row], key: str) -> dict[int, float]:
  """Returns the values of one program by length, without missing ones."""
  return {row["length"]: row[key] for row in rows if row[key] is not None}


def exponent(values: Series, lengths: Sequence[int]) -> float | None:
  """Fits a in values ∝ Tᵃ by least squares of logarithms.

  It uses only the upper half of `lengths`, including the middle one (of 256 …
  16,384, from 2,048 on), since constant costs dominate at short lengths.

  Returns:
    The exponent, or None if fewer than two lengths have a value.
  """
  ordered = sorted(lengths)
  upper = [x for x in ordered[len(ordered) // 2 :] if values.get(x, 0.0) > 0.0]
  if len(upper) < 2:
    return None
  x, y = np.log(upper), np.log([values[length] for length in upper])
  x = x - x.mean()
  return float(x @ y / (x @ x))


def crossover(values: Series, dense: Series) -> float | None:
  """Returns the length from which on a mechanism is faster than dense attention.

  Between two lengths, the logarithm of time is interpolated linearly in the logarithm
  of length.

  Returns:
    The crossover, the shortest common length if the mechanism is always faster, or
    None if it is not faster at the longest.
  """
  common = sorted(values.keys() & dense.keys())
  if not common:
    return None
  speedup = [math.log(dense[x] / values[x]) for x in common]
  if speedup[-1] <= 0.0:
    return None
  slower = [i for i, x in enumerate(speedup) if x <= 0.0]
  if not slower:
    return float(common[0])
  i = slower[-1]
  fraction = -speedup[i] / (speedup[i + 1] - speedup[i])
  return common[i] * (common[i + 1] / common[i]) ** fraction


def markdown(rows: Sequence[Row]) -> str:
  """Formats tables of time, relative time and memory for each part."""
  lengths = sorted({row["length"] for row in rows})
  texts = []
  for part in PARTS:
    groups: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
      if row["part"] == part:
        groups.setdefault((row["mechanism"], row["causal"]), []).append(row)
    if groups:
      texts += _part(part, groups, lengths)
  reasons = [
    f"- `{row['mechanism']}`{', causal' * row['causal']}, {row['part']}, "
    f"{row['length']}: {row['reason']}"
    for row in rows
    if "reason" in row
  ]
  return "\n\n".join([*texts, "\n".join(reasons)]).strip()


def _part(
  part: str,
  groups: Mapping[tuple[str, bool], Sequence[Row]],
  lengths: Sequence[int],
) -> list[str]:
  """Formats the three tables of one part."""
  base = DENSE if part == DECODE else BASELINE
  columns = [f"{length:,}" for length in lengths]
  times, ratios, memory = [], [], []
  for (name, causal), rows in groups.items():
    title = [f"`{name}`", "✓" if causal else ""]
    seconds, spread, temp, compiling = (
      series(rows, key)
      for key in ("seconds", "spread", "temp_bytes", "compile_seconds")
    )
    dense, baseline = (
      series(groups.get((other, causal), ()), "seconds")
      for other in (DENSE, base)
    )
    times.append(
      [
        *title,
        *(_time(seconds.get(x), spread.get(x)) for x in lengths),
        _number(exponent(seconds, lengths), 2),
        ""
        if name == DENSE
        else _crossover_cell(crossover(seconds, dense), seconds),
      ]
    )
    ratios.append(
      title
      + [
        _number(seconds.get(length), 3, baseline.get(length))
        for length in lengths
      ]
    )
    memory.append(
      [
        *title,
        *(_number(temp.get(x), 1, 2**20) for x in lengths),
        _number(exponent(temp, lengths), 2),
        f"{np.median(list(compiling.values())):.1f}" if compiling else "–",
      ]
    )
  head = ["mechanism", "causal"]
  return [
    f"### {part}: ms, median ± half the interquartile range",
    _table([*head, *columns, "exponent", "faster than `dense` from"], times),
    f"### {part}: × `{base}`",
    _table([*head, *columns], ratios),
    f"### {part}: MiB of temporaries",
    _table([*head, *columns, "exponent", "compile s"], memory),
  ]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  rule = ["---", ":-:", *["--:"] * (len(head) - 2)]
  return table([head, rule, *rows])


def _time(seconds: float | None, spread: float | None) -> str:
  if seconds is None:
    return "–"
  text = _milliseconds(seconds)
  return text if spread is None else f"{text} ± {_milliseconds(spread)}"


def _milliseconds(seconds: float) -> str:
  value = seconds * 1e3
  return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _number(
  value: float | None, decimals: int, unit: float | None = 1.0
) -> str:
  """Formats a value in units; a dash if either is missing."""
  if value is None or unit is None:
    return "–"
  return f"{value / unit:.{decimals}f}"


def _crossover_cell(value: float | None, seconds: Series) -> str:
  if value is None:
    return "–"
  return f"{'≤ ' * (value <= min(seconds))}{value:,.0f}"
