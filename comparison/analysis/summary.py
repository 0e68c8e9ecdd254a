"""One row per mechanism: the results of its seeds, and whether it is the best."""

import collections
from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from comparison import criterion, records
from comparison.analysis import statistics
from comparison.measurement.usage import BUSY_CORES
from training.best import is_lower_better

DIFFERENT = 0.05
"""Significance level of a difference from the best row."""

NOTHING_FOUND = "No run has finished yet."


class Cost(NamedTuple):
  """A column with a cost of a run; docs/comparing.md describes its measurement.

  Attributes:
    title: title of the column.
    unit: unit of the shown numbers; empty for a count.
    scale: factor from the record to that unit.
    meaning: one line, for a table that explains its columns.
    load: for a time, the column with the cores that other programs used.
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


def summarize(runs: pd.DataFrame) -> pd.DataFrame:
  """The results of every row of a comparison, over all its seeds.

  A row with a grid shows the point with the best mean of the metric over the
  choosing runs, on the first held-out split; points with failed runs come last. In
  records of older versions, which have no choosing runs, the reported runs choose.

  Args:
    runs: the table of `frame.runs`.

  Returns:
    Columns `task`, `row`, `name`, which is the row without the parts that all rows of
    the task share, `attention`, `across`, `width`, `grid` and `at_edge`; `split`,
    `metric`; `seeds` that finished, of `planned` ones; `solved_at`, the threshold of
    a task that models either solve or fail; `solved`, the number of seeds that reach
    it, if any does, of `trials`, the seeds that finished or failed; `mean`, `low`,
    `high`, `worst`, `best` of the metric; `p` against the best row, with Holm's
    correction over the rows of the task; `is_best`, and `is_tied`, no significant
    difference from the best; means of all metrics and of `COSTS`, times only of runs
    that had the machine to themselves; `busy`, whether a time was left out; `notes`,
    `reason`. Sorted within a task, the best first.
  """
  if runs.empty:
    return pd.DataFrame()
  # A task whose grid points are still being chosen has no rows yet.
  is_open = runs.groupby("task")["choosing"].transform("all")
  tables = [
    _task(group) for _, group in runs[~is_open].groupby("task", sort=False)
  ]
  return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def is_counted(summary: pd.DataFrame) -> bool:
  """Whether a task counts solved seeds, as in 'solved 5 of 8', instead of a mean."""
  return bool(summary["solved"].notna().any())


def finding(summary: pd.DataFrame) -> str:
  """A sentence on the result of one task."""
  ended = summary[summary["seeds"] > 0]
  if ended.empty:
    return NOTHING_FOUND
  best, others = ended.iloc[0], len(ended) - 1
  if not others:
    reached = f"{best['metric']} {number(best['mean'])}"
    if is_counted(ended):
      reached = (
        f"{best['solved']:.0f} of {best['trials']:.0f} seeds have {best['metric']} "
        f"of {best['solved_at']:g} or more"
      )
    return f"Only `{best['name']}` has finished: {reached} on the {best['split']} split."
  if is_counted(ended):
    alike = (
      ended[["solved", "trials"]].eq(best[["solved", "trials"]]).all(axis=1)
    )
    names = enumeration(list(ended[alike]["name"]))
    unsolved = int((ended["solved"] == 0).sum())
    text = (
      f"{names} solved {best['solved']:.0f} of {best['trials']:.0f} seeds "
      f"({best['metric']} of {best['solved_at']:g} or more on the "
      f"{best['split']} split); {unsolved} of {len(ended)} rows solved none"
    )
  else:
    alike = ended["mean"].eq(best["mean"])
    if alike.all():
      return (
        f"None has the best {best['metric']} on the {best['split']} split: all rows "
        f"have {number(best['mean'])}."
      )
    names = enumeration(list(ended[alike]["name"]))
    text = (
      f"{names} {'have' if alike.sum() > 1 else 'has'} the best {best['metric']} on "
      f"the {best['split']} split, {number(best['mean'])}"
    )
  if best["seeds"] < 2:
    return text + "; with one seed no difference is significant."
  different = others - int(ended["is_tied"].sum() - 1)
  if others == 1:
    rows = f"The other row {'differs' if different else 'does not differ'}"
  else:
    count = {others: "All", 0: "None"}.get(different, different)
    rows = f"{count} of the {others} other rows "
    rows += "differs" if different == 1 else "differ"
  first = "the first" if is_counted(ended) else "it"
  return f"{text}. {rows} significantly from {first} (5 %, Holm)."


def number(value: float) -> str:
  """Formats a number for a reader, usually with three decimals."""
  if not math.isfinite(value):
    return "–"
  size = abs(value)
  if size >= 1000:
    return f"{value:,.0f}"
  if 0 < size < 0.01 or size >= 10:
    return f"{value:.4g}" if size < 0.01 else f"{value:.1f}"
  return f"{value:.3f}"


def common(summary: pd.DataFrame) -> list[str]:
  """The values of `across` that all rows of a task share: 'features=64'."""
  points = [point.split(", ") for point in summary["across"]]
  first = [part for part in points[0] if part] if len(points) > 1 else []
  return [part for part in first if all(part in point for point in points)]


def enumeration(names: Sequence[str], most: int = 4) -> str:
  """'`a`, `b` and `c`'; of more than `most` names the first, and a count of the rest."""
  texts = [f"`{name}`" for name in names]
  if len(texts) > most:
    texts = [*texts[: most - 1], f"{len(texts) - most + 1} other rows"]
  return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _task(runs: pd.DataFrame) -> pd.DataFrame:
  ended = runs[~runs["choosing"] & (runs["split"] != "")]
  columns = [str(c) for c in runs]
  metrics = [c for c in columns if _is_metric(c) and ended[c].notna().any()]
  metric = criterion.headline(_common_metrics(ended, metrics))
  summary = pd.DataFrame(
    [
      _row(group, metric, metrics)
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
    summary = _significance(
      _ranked(summary, metric, runs["solved_at"].astype(float).max())
    )
  return summary.drop(columns="values", errors="ignore")


def _common_metrics(ended: pd.DataFrame, metrics: list[str]) -> list[str]:
  """The metrics, without `LAST` if older runs of the table do not have it."""
  if criterion.LAST not in metrics or "accuracy" not in metrics:
    return metrics
  older = ended["accuracy"].notna() & ended[criterion.LAST].isna()
  return [m for m in metrics if m != criterion.LAST or not older.any()]


def _ranked(
  summary: pd.DataFrame, metric: str, threshold: float | None
) -> pd.DataFrame:
  """Sorts rows by the share of solved seeds, if there are any, and by their mean."""
  # The threshold belongs to the main metric of the task, which is a share.
  lower = is_lower_better(metric)
  solved = [
    sum(x >= threshold for x in values.values()) if values else np.nan
    for values in summary["values"]
  ]
  if not lower:
    summary["solved_at"] = threshold
    if np.nansum(solved) > 0:
      summary["solved"] = solved
  mean = summary["mean"] * (1 if lower else -1)
  share = -(summary["solved"] / summary["trials"].clip(lower=1)).astype(float)
  order = np.lexsort([mean.fillna(np.inf), share.fillna(np.inf)])
  return summary.iloc[order].reset_index(drop=True)


def _row(
  runs: pd.DataFrame, metric: str | None, metrics: list[str]
) -> dict[str, Any]:
  """A line of the summary, with 'values', the metric of each of its seeds."""
  point, points = _chosen(runs, metric)
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
  lower = is_lower_better(metric or "")
  ordered = sorted(values.values(), reverse=not lower) or [math.nan]
  names = ("task", "row", "attention", "across", "width", "grid")
  row = {
    **{name: first[name] for name in names},
    "points": points,
    **{name: first[name] for name in ("at_edge", "slots", "options")},
    "split": ended["split"].iloc[0] if len(ended) else "",
    "metric": metric,
    "values": values,
    "seeds": len(values),
    # A seed that diverged counts as unsolved.
    "trials": len(ended) + int((planned["status"] == records.FAILED).sum()),
    "planned": len(planned),
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


def _chosen(runs: pd.DataFrame, metric: str | None) -> tuple[pd.DataFrame, int]:
  """The runs at the chosen point of the grid, and the number of points."""
  points = {grid: group for grid, group in runs.groupby("grid", sort=True)}
  candidates = {
    grid: group for grid, group in points.items() if not group["choosing"].all()
  }

  lower = is_lower_better(metric or "")

  def preference(grid: Any) -> tuple[float, float, float]:
    group = candidates[grid]
    choosing = group[group["choosing"]] if group["choosing"].any() else group
    ended = (choosing["split"] != "").mean()
    quality = _numbers(choosing["choosing_quality"], drop=False)
    solved = (quality >= _numbers(choosing["solved_at"], drop=False)).mean()
    mean = float(quality.mean())
    rank = -math.inf if math.isnan(mean) else -mean if lower else mean
    return float(ended), 0.0 if lower else float(solved), rank

  return candidates[max(candidates, key=preference)], len(points)


def _significance(summary: pd.DataFrame) -> pd.DataFrame:
  """Adds tests of every row against the first."""
  best, p_values = summary.iloc[0], []
  for _, row in summary.iterrows():
    if row["row"] == best["row"] or not row["values"]:
      p_values.append(math.nan)
    elif is_counted(summary):
      counts = [
        int(r[name]) for r in (row, best) for name in ("solved", "trials")
      ]
      p_values.append(statistics.p_of_counts(*counts))
    else:
      p_values.append(statistics.p_of_means(row["values"], best["values"]))
  summary["p"] = statistics.holm(p_values)
  summary["is_best"] = (summary.index == 0) & (summary["seeds"] > 0)
  # Untested rows, such as those with one seed, count as tied.
  summary["is_tied"] = (summary["seeds"] > 0) & ~(summary["p"] < DIFFERENT)
  return summary


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
