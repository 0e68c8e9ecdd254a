"""Compares measured time, memory and their growth with bounds.

The bounds are for B 1, N 8, H 64, T 4,096 and float32 on two CPU cores. Times are
ratios to `jax.nn.dot_product_attention` in the same run, to its causal form for causal
forms. Memory is XLA's temporaries. The bounds at length 4,096 were reached by
prototypes in plain XLA on this kind of machine. The peers are the fastest programs by
others that were measured there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from attention import mechanism as mechanisms
from benchmarks import scaling_tables
from benchmarks.programs import BASELINE, DECODE, FORWARD, TRAINING

LENGTH = 4096
LONGER = 16_384

GROWTH = 4.6
"""The largest factor of a linear cost when the length grows four times."""

_MIB = 2**20


class Bound(NamedTuple):
  """Bounds for one form of a mechanism, forward and with gradients.

  Attributes:
    ratio: time relative to the baseline.
    mebibytes: temporaries; None means no bound.
    peer: the best times of other programs, for the reader.
  """

  ratio: tuple[float, float]
  mebibytes: tuple[float, float] | None
  peer: str


BOUNDS: Mapping[tuple[str, bool], Bound] = {
  ("flash", False): Bound(
    (0.38, 0.46), (24, 50), "torch SDPA 0.29 / 0.40; ringattention 0.54 / 0.81"
  ),
  ("flash", True): Bound(
    (0.23, 0.19), (12, 48), "torch SDPA 0.18 / 0.18; ringattention 0.36 / 0.46"
  ),
  ("sliding_window", False): Bound(
    (0.10, 0.08), (6, 18), "torch flex 0.13 / –; local-attention 0.23 / 0.20"
  ),
  ("performer", False): Bound((0.055, 0.047), (5, 20), "LRA 0.13 / 0.11"),
  ("performer", True): Bound((0.085, 0.072), (5, 34), "LRA 0.20 / 0.22"),
  ("linformer", False): Bound((0.05, 0.048), (16, 22), "LRA 0.055 / 0.086"),
  ("nystrom", False): Bound((0.022, 0.03), (4, 27), "HF 0.042 / 0.027"),
  ("bigbird", False): Bound((0.125, 0.16), (60, 120), "HF 0.22 / 0.20"),
  ("lsh", False): Bound((0.185, 0.175), (115, 180), "LRA 0.29 / 0.20"),
  ("dense", False): Bound((0.45, 0.70), None, "–"),
}
"""(mechanism, causal) -> bound, at the sizes of `programs`."""


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a table of measured values, bounds and verdicts.

  Args:
    rows: rows of `benchmarks.timing` that include `LENGTH`.
  """
  row_by_part = {
    (row["mechanism"], row["causal"], row["part"]): row
    for row in rows
    if row["length"] == LENGTH
  }
  head = ["mechanism", "causal", "part", "× baseline", "bound", ""]
  head += ["MiB", "bound", "", "peers, forward / forward+backward"]
  lines = [head, ["---", ":-:", "---", *["--:", "--:", "---"] * 2, "---"]]
  for (name, causal), bound in BOUNDS.items():
    for i, part in enumerate((FORWARD, TRAINING)):
      row = row_by_part.get((name, causal, part), {})
      base = row_by_part.get((BASELINE, causal, part), {})
      cells = [f"`{name}`", "✓" if causal else "", part]
      seconds, base_seconds = row.get("seconds"), base.get("seconds")
      ratio = seconds / base_seconds if seconds and base_seconds else None
      cells += _judge(ratio, bound.ratio[i], 3)
      memory = row.get("temp_bytes")
      limit = None if bound.mebibytes is None else bound.mebibytes[i]
      cells += _judge(None if memory is None else memory / _MIB, limit, 1)
      lines.append([*cells, "" if i else bound.peer])
  return scaling_tables.table(lines)


def growth_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns a table of the growth of time and temporaries from 4,096 to 16,384.

  Temporaries have a bound for every mechanism, time only for mechanisms of linear
  cost. The baseline is left out.

  Args:
    rows: rows of `benchmarks.timing` that include both lengths.
  """
  row_by_length = {
    (row["mechanism"], row["causal"], row["part"], row["length"]): row
    for row in rows
  }
  lines = [
    ["mechanism", "causal", "part", "time", "bound", "", "MiB", "bound", ""],
    ["---", ":-:", "---", *["--:", "--:", "---"] * 2],
  ]
  for (name, causal, part, length), row in row_by_length.items():
    longer = row_by_length.get((name, causal, part, LONGER), {})
    if length != LENGTH or name == BASELINE or part == DECODE or not longer:
      continue
    cells = [f"`{name}`", "✓" if causal else "", part]
    is_linear = mechanisms.example(name).cost == "linear"
    for quantity, bound in (
      ("seconds", GROWTH if is_linear else None),
      ("temp_bytes", GROWTH),
    ):
      short, long = row[quantity], longer[quantity]
      cells += _judge(long / short if short and long else None, bound, 1)
    lines.append(cells)
  return scaling_tables.table(lines)


def _judge(
  value: float | None, bound: float | None, decimals: int
) -> list[str]:
  """Returns the measured value, the bound and the verdict."""
  text = "not run" if value is None else f"{value:.{decimals}f}"
  if value is None or bound is None:
    return [text, "–" if bound is None else f"{bound:g}", ""]
  return [text, f"{bound:g}", "pass" if value <= bound else "**short**"]
