"""The results of each row over its seeds, with tests of differences."""

import collections
from collections.abc import Mapping
import math
import types
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from comparison import criterion, records
from comparison.analysis import statistics
from comparison.measurement.usage import BUSY_CORES
from training.best import is_lower_better

DIFFERENT = 0.05
"""Significance level of a difference from the first row or the reference."""


class Cost(NamedTuple):
  """A column with a cost of a run; docs/comparing.md describes the measurements.

  Attributes:
    title: title of the column.
    unit: unit of the shown numbers; empty for a count.
    scale: factor from the record to that unit.
    meaning: one line that explains the column.
    load: for a time, the column with the number of cores that other programs used.
  """

  title: str
  unit: str
  scale: float
  meaning: str = ""
  load: str = ""


_TRAINING, _MEASURING = "others_cores", "measured_others_cores"

COSTS: Mapping[str, Cost] = {
  "parameters": Cost("parameters", "", 1),
  "forward_flops": Cost("forward", "GFLOP", 1e-9),
  "train_flops": Cost("update", "GFLOP", 1e-9),
  "step_seconds": Cost("step", "ms", 1e3, load=_MEASURING),
  "tokens_per_second": Cost("training", "tokens/s", 1, load=_TRAINING),
  "temp_bytes": Cost("temporaries", "MiB", 2**-20),
  "device_peak_bytes": Cost("device peak", "MiB", 2**-20),
  "decode_tokens_per_second": Cost("decoding", "tokens/s", 1, load=_MEASURING),
  "cache_bytes": Cost("cache and state", "KiB", 2**-10),
  "compile_seconds": Cost("compiling", "s", 1, load=_MEASURING),
  "seconds": Cost("run", "min", 1 / 60, load=_TRAINING),
  "peak_bytes": Cost("process peak", "MiB", 2**-20),
}


def summarize(
  runs: pd.DataFrame,
  plan: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
  reference: str | None = None,
) -> pd.DataFrame:
  """The results of each row of a comparison, over all its seeds.

  A row with a grid shows the point with the best mean of the metric over the
  choosing runs, on the first held-out split; points with failed runs come last. Records
  of older versions have no choosing runs, so the reported runs choose the point.

  Args:
    runs: the table of `frame.runs`.
    plan: `records.planned_runs`; without it, all planned runs have records.
    reference: name of the row that was declared to be the reference; None compares
      with the first row.

  Returns:
    Columns `task`, `row`, `name`, which is the row without the parts that all rows of
    the task share, `attention`, `across`, `width`, `grid` and `at_edge`; `split`,
    `metric`; `seeds`, the number of seeds that finished, of `planned` ones; `added`,
    the seeds that were planned later than the others; `is_complete`, whether all have
    ended; `diverged`, the number of seeds that failed or have no finite metric;
    `solved_at`, the threshold of a task that models either solve or fail; `solved`, the
    number of seeds that reach it, of `trials`, the seeds that finished or failed;
    `mean`, `low`, `high`, `worst`, `best` of the metric; `against`, the row with which
    a row is compared, the `difference` from it with `difference_low` and
    `difference_high`, its `p`, and the name of the `test`; `is_tied`, whether the
    difference is not significant; means of all metrics and of `COSTS`, with times only
    of undisturbed measurements; `busy`, whether a time was omitted; `notes`, `reason`.
    Sorted within a task: complete rows first, then by Wilson's lower bound of the share
    of solved seeds, then by the mean.
  """
  if runs.empty:
    return pd.DataFrame()
  # A task whose grid points are still being chosen has no rows yet.
  is_open = runs.groupby("task")["choosing"].transform("all")
  tables = [
    _task(group, plan, reference)
    for _, group in runs[~is_open].groupby("task", sort=False)
  ]
  return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def has_solved_seeds(summary: pd.DataFrame) -> bool:
  """Returns whether the result is a number of solved seeds instead of a mean."""
  return bool(summary["solved_at"].notna().any())


def common(summary: pd.DataFrame) -> list[str]:
  """The values of `across` that all rows of a task share: 'features=64'."""
  points = [point.split(", ") for point in summary["across"]]
  first = [part for part in points[0] if part] if len(points) > 1 else []
  return [part for part in first if all(part in point for point in points)]


def _task(
  runs: pd.DataFrame,
  plan: Mapping[str, Mapping[str, Any]],
  reference: str | None,
) -> pd.DataFrame:
  ended = runs[~runs["choosing"] & (runs["split"] != "")]
  columns = [str(c) for c in runs]
  metrics = [c for c in columns if _is_metric(c) and ended[c].notna().any()]
  metric = criterion.headline(_common_metrics(ended, metrics))
  summary = pd.DataFrame(
    [
      _row(group, metric, metrics, plan)
      for _, group in runs.groupby("row", sort=False)
      if not group["choosing"].all()
    ]
  )
  shared = common(summary)
  summary["name"] = [
    ", ".join(part for part in row.split(", ") if part not in shared)
    for row in summary["row"]
  ]
  if metric is not None:
    threshold = runs["solved_at"].astype(float).max()
    summary = _rank(summary, metric, threshold)
  summary = _significance(summary, reference)
  return summary.drop(columns=["values", "unfinished"], errors="ignore")


def _common_metrics(ended: pd.DataFrame, metrics: list[str]) -> list[str]:
  """The metrics, without `LAST` if older runs of the table do not have it."""
  if criterion.LAST not in metrics or "accuracy" not in metrics:
    return metrics
  older = ended["accuracy"].notna() & ended[criterion.LAST].isna()
  return [m for m in metrics if m != criterion.LAST or not older.any()]


def _rank(
  summary: pd.DataFrame, metric: str, threshold: float | None
) -> pd.DataFrame:
  """Sorts rows: complete ones first, then by the share of solved seeds and the mean.

  For the mean, a seed that diverged has the worst value of the task.
  """
  # The threshold belongs to the main metric of the task, which is a share.
  is_lower = is_lower_better(metric)
  bounds = np.zeros(len(summary))
  if not is_lower and threshold is not None and not math.isnan(threshold):
    summary["solved_at"] = threshold
    summary["solved"] = [
      sum(x >= threshold for x in values.values()) if values else np.nan
      for values in summary["values"]
    ]
    bounds = [
      statistics.wilson(row["solved"], row["trials"])[0]
      if row["seeds"]
      else -1.0
      for _, row in summary.iterrows()
    ]
  table = _table(summary, metric)
  means = table.mean(axis=1).fillna(-math.inf) * (-1 if is_lower else 1)
  keys = [-means, -np.round(bounds, 9)]
  order = np.lexsort([*keys, ~summary["is_complete"], summary["seeds"] == 0])
  return summary.iloc[order].reset_index(drop=True)


def _row(
  runs: pd.DataFrame,
  metric: str | None,
  metrics: list[str],
  plan: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
  """A row of the summary, with the metric of each seed in 'values'.

  'unfinished' are the seeds that failed or have no finite metric.
  """
  point, points = _select_point(runs, metric)
  planned = point[~point["choosing"]]
  ended = planned[planned["split"] != ""]
  first = planned.iloc[0]
  values: dict[int, float] = {}
  if metric is not None:
    numbers = _numbers(ended.set_index("seed")[metric])
    values = dict(
      zip(map(int, numbers.index), map(float, numbers), strict=True)
    )
  cases = _numbers(ended["test_rows"]) if "test_rows" in ended else ()
  low, high = statistics.mean_interval(
    list(values.values()),
    criterion.upper_bound(metric or ""),
    int(max(cases)) if len(cases) else None,
  )
  is_lower = is_lower_better(metric or "")
  ordered = sorted(values.values(), reverse=not is_lower) or [math.nan]
  failed = planned["seed"][planned["status"] == records.FAILED]
  unfinished = {*map(int, failed), *map(int, ended["seed"])} - values.keys()
  row_plan = [
    x
    for x in plan.values()
    if x.get("row") == f"{first['task']}, {first['row']}"
    and not x.get("choosing")
  ]
  seeds = {*map(int, planned["seed"]), *(x["seed"] for x in row_plan)}
  added = {x["seed"] for x in row_plan if x.get(records.ADDED)}
  names = ("task", "row", "attention", "across", "width", "grid")
  row = {
    **{name: first[name] for name in names},
    "points": points,
    **{name: first[name] for name in ("at_edge", "slots", "options")},
    "split": ended["split"].iloc[0] if len(ended) else "",
    "metric": metric,
    "values": values,
    "unfinished": unfinished,
    "diverged": len(unfinished),
    "seeds": len(values),
    # A seed that diverged did not solve the task.
    "trials": len(values) + len(unfinished),
    "planned": len(seeds),
    "added": ", ".join(map(str, sorted(added))),
    "is_complete": len(values) + len(unfinished) == len(seeds),
    "solved": math.nan,
    "solved_at": math.nan,
    "mean": float(np.mean(ordered)),
    "low": low,
    "high": high,
    "worst": ordered[-1],
    "best": ordered[0],
    **{name: _mean(ended, name) for name in metrics},
    "approximation_error": _mean(ended, "approximation_error"),
  }
  busy = False
  for name, cost in COSTS.items():
    rows = ended
    if cost.load and cost.load in ended:
      mask = ~(_numbers(ended[cost.load], drop=False) > BUSY_CORES)
      rows, busy = ended[mask], busy or not mask.all()
    row[name] = _mean(rows, name)
  for name in ("feed_forward", "dense_feed_forward", "dense_parameters"):
    row[name] = _mean(planned, name)
  texts = _texts(planned, ended, metric, len(values))
  return row | {"busy": busy, **texts}


def _texts(
  planned: pd.DataFrame,
  ended: pd.DataFrame,
  metric: str | None,
  num_values: int,
) -> dict[str, str]:
  """The reason why a row has no result, or notes on its runs."""
  unfinished = planned[planned["split"] == ""]
  counts = collections.Counter(
    f"{run.status}: {run.reason or ''}" for run in unfinished.itertuples()
  )
  if ended.empty:
    return {"notes": "", "reason": next(iter(counts), "")}
  notes = [
    f"{count} of {len(planned)} runs {reason}"
    for reason, count in counts.items()
  ]
  if num_missing := len(ended) - num_values:
    notes.append(
      f"{num_missing} of {len(planned)} runs have no finite {metric or 'metric'}"
    )
  notes += [f"not measured: {x}" for x in ended["reason"].dropna().unique()]
  texts = ended["notes"].fillna("") if "notes" in ended else ()
  notes += dict.fromkeys(line for text in texts for line in text.splitlines())
  return {"notes": "\n".join(notes), "reason": ""}


def _select_point(
  runs: pd.DataFrame, metric: str | None
) -> tuple[pd.DataFrame, int]:
  """The runs at the chosen point of the grid, and the number of points."""
  points = {grid: group for grid, group in runs.groupby("grid", sort=True)}
  candidates = {
    grid: group for grid, group in points.items() if not group["choosing"].all()
  }

  is_lower = is_lower_better(metric or "")

  def preference(grid: Any) -> tuple[float, float, float]:
    group = candidates[grid]
    choosing = group[group["choosing"]] if group["choosing"].any() else group
    ended = (choosing["split"] != "").mean()
    quality = _numbers(choosing["choosing_quality"], drop=False)
    solved = (quality >= _numbers(choosing["solved_at"], drop=False)).mean()
    mean = float(quality.mean())
    rank = -math.inf if math.isnan(mean) else -mean if is_lower else mean
    return float(ended), 0.0 if is_lower else float(solved), rank

  return candidates[max(candidates, key=preference)], len(points)


def _significance(summary: pd.DataFrame, reference: str | None) -> pd.DataFrame:
  """Adds tests of every complete row against the first one or the reference."""
  columns = ["difference", "difference_low", "difference_high", "p"]
  summary[columns] = math.nan
  summary[["against", "test"]] = ""
  enough = (summary["trials"] >= statistics.FEWEST) & (summary["seeds"] > 0)
  tested = list(summary.index[summary["is_complete"] & enough])
  names = (summary["row"] == reference) | (summary["name"] == reference)
  declared = [n for n in tested if names[n]]
  if reference is not None and not declared:
    summary["test"] = f"none yet, because `{reference}` has no complete row"
    tested = []
  # The row that all others are compared with comes first.
  tested.sort(key=lambda n: n not in declared)
  if len(tested) > 1:
    rows = summary.loc[tested]
    result = _compare_rows(rows, bool(declared))
    content = (result.difference, result.low, result.high, result.p_values)
    summary.loc[tested, columns] = np.stack(content, axis=1)
    against = rows["name"].iloc[0]
    kind = "declared beforehand" if declared else "the first row"
    summary.loc[tested, "against"] = against
    summary.loc[tested, "test"] = f"against `{against}`, {kind}; {result.test}"
  # Untested rows, such as those with one seed, are tied.
  summary["is_tied"] = (summary["seeds"] > 0) & ~(summary["p"] < DIFFERENT)
  return summary


def _table(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
  """The metric of every row and seed; a seed that diverged is the worst of all."""
  values = [x for row in rows["values"] for x in row.values()]
  worst = (max if is_lower_better(metric) else min)(values, default=math.nan)
  if math.isfinite(criterion.upper_bound(metric)):
    worst = 0.0
  content = [
    row["values"] | dict.fromkeys(row["unfinished"], worst)
    for _, row in rows.iterrows()
  ]
  return pd.DataFrame(content, index=rows.index)


def _compare_rows(
  rows: pd.DataFrame, is_declared: bool
) -> statistics.RowComparison:
  """Compares each row with the first."""
  metric = rows["metric"].iloc[0]
  table = _table(rows, metric).to_numpy(float)
  pairs = "of any row from it" if is_declared else "between any two rows"
  if has_solved_seeds(rows):
    threshold = rows["solved_at"].iloc[0]
    quantity = f"share of solved seeds or the mean up to {threshold:g}"
    counts = rows[["solved", "trials"]].astype(int).to_numpy()
    ends = [statistics.share_difference(*x, *counts[0]) for x in counts]
  elif rows["diverged"].any():
    # Means over seeds that diverged are not normally distributed.
    threshold, quantity = (
      math.inf,
      "mean, where a seed that diverged has the worst value",
    )
    ends = [(math.nan,) * 3] * len(rows)
  elif is_declared:
    return statistics.compare_with_reference(table)
  else:
    return statistics.compare_with_first(table)
  difference, low, high = np.array(ends).T
  p_values = statistics.p_by_shuffles(table, threshold, not is_declared)
  test = (
    f"permutation test within seeds of the largest difference {pairs} in the "
    f"{quantity}"
  )
  return statistics.RowComparison(difference, low, high, p_values, test)


def _is_metric(name: str) -> bool:
  return name in criterion.HEADLINES or name.endswith(
    ("_loss", "_accuracy", "perplexity", "per_character", "return")
  )


def _mean(runs: pd.DataFrame, name: str) -> float:
  if name not in runs or runs.empty:
    return math.nan
  return float(_numbers(runs[name]).mean())


def _numbers(values: pd.Series, drop: bool = True) -> pd.Series:
  numbers = pd.to_numeric(values, errors="coerce")
  return numbers.dropna() if drop else numbers
