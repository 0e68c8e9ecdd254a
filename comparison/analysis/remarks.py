"""Sentences that qualify the numbers of a table."""

from collections.abc import Mapping
import functools
from typing import Any

import numpy as np
import pandas as pd

from comparison import criterion, plan, records
from comparison.analysis.sentences import enumeration
from comparison.analysis.task import Task
from comparison.planned_run import label, point
from comparison.records import Record
from settings.errors import ConfigError

_EARLIER, _FALL = 0.75, 0.02
"""A loss is still falling if it fell by 2 % over the last quarter of the steps."""

_MAX_NAMES = 6
"""Largest number of names in a sentence."""


def tests(task: Task) -> str:
  """How rows were compared, with a warning about seeds that were added later."""
  summary = task.summary
  texts = [f"Tests: {text}." for text in sorted({*summary["test"]} - {""})]
  added = {int(x) for seeds in summary["added"] for x in seeds.split(", ") if x}
  if added:
    seeds = ", ".join(map(str, sorted(added)))
    texts.append(
      f"Seeds {seeds} were added to those planned at first. If results led to them, "
      "5 % of false differences become about 9 %."
    )
  return " ".join(texts)


def notes(task: Task) -> list[str]:
  """Notes on rows; rows with the same note are listed together."""
  rows: dict[str, list[str]] = {}
  for _, row in task.summary.iterrows():
    for note in (row["notes"] or "").splitlines():
      rows.setdefault(note, []).append(row["name"])
    width, dense = row["feed_forward"], row["dense_feed_forward"]
    if width < dense / 2 and row["width"] != "dense":
      note = f"a feed-forward layer of {width:.0f}, dense has {dense:.0f}"
      rows.setdefault(note, []).append(row["name"])
    deviation = row["parameters"] / row["dense_parameters"] - 1
    if abs(deviation) > 0.02 and row["width"] != "dense":
      rows.setdefault(f"{100 * deviation:+.0f} % parameters", []).append(
        row["name"]
      )
  return [
    f"{', '.join(f'`{name}`' for name in names)}: {note}"
    for note, names in rows.items()
  ]


def choice_warnings(task: Task) -> list[str]:
  """Warnings that the choice of a grid point may have missed one that solves the task.

  Points that halving stopped are listed only for rows with seeds that do not solve it.
  """
  summary = task.summary
  if summary["solved_at"].isna().all():
    return []
  names = dict(zip(summary["row"], summary["name"], strict=True))
  unsolved = set(summary["row"][~(summary["solved"] >= summary["trials"])])
  stopped: dict[str, list[str]] = {}
  results: dict[str, list[bool]] = {}
  points = dict(zip(summary["row"], summary["grid"], strict=True))
  for record in task.records:
    row, grid = label(record), point(record.get("grid", {}))
    is_stopped = record["status"] == records.STOPPED_EARLY
    if is_stopped and row in unsolved and _was_falling(record):
      stopped.setdefault(names[row], []).append(grid)
    is_done = record["status"] == records.DONE
    if is_done and record.get("choosing") and grid == points.get(row):
      line = _last(record)
      solved = criterion.is_solved(line, record.get("solved_at"))
      results.setdefault(names[row], []).append(solved)
  texts = []
  if stopped:
    parts = [
      f"{row}: {', '.join(dict.fromkeys(x))}" for row, x in stopped.items()
    ]
    texts.append(
      "Halving stopped points whose loss was still falling, which might have solved "
      f"the task later: {enumeration(parts, _MAX_NAMES)}"
    )
  split = [
    f"{row}: {sum(solved)} of {len(solved)}"
    for row, solved in results.items()
    if 0 < sum(solved) < len(solved)
  ]
  if split:
    texts.append(
      "The choosing seeds disagree on whether the chosen point solves the task, so "
      f"the choice depends strongly on chance: {enumeration(split, _MAX_NAMES)}"
    )
  return texts


@functools.cache
def has_answer_per_prefix(task: str) -> bool:
  """Whether a task, named by its file in configs/, has an answer for every prefix."""
  try:
    config: Any = plan.config_of(task, plan.BASELINE, {})
  except ConfigError:  # The file does not exist.
    return False
  return getattr(config.task, "answers_prefixes", False)


def old_metric_note(summary: pd.DataFrame) -> str:
  """A note if the main metric is a mean over prefixes, not at the last position."""
  first = summary.iloc[0]
  if first["metric"] != "accuracy" or not has_answer_per_prefix(first["task"]):
    return ""
  return (
    f"`accuracy` is a mean over all prefixes here, which hides errors at the end: "
    f"some of these records are older than `{criterion.LAST}`."
  )


def _was_falling(record: Record) -> bool:
  """Whether the loss of a stopped run was still falling at its last evaluation."""
  lines = [
    x for x in record.get("history", ()) if np.isfinite(x.get("loss", np.nan))
  ]
  held_out = [x for x in lines if x["split"] != "train"]
  curve = (
    held_out
    if len(held_out) > 2
    else [x for x in lines if x["split"] == "train"]
  )
  earlier = [x for x in curve if x["step"] <= _EARLIER * curve[-1]["step"]]
  if not earlier:
    return False
  before = earlier[-1]["loss"]
  # The log-likelihood of a density may be negative.
  return curve[-1]["loss"] < before - _FALL * abs(before)


def _last(record: Record) -> Mapping[str, Any]:
  """The last evaluation of a record on the split on which points are chosen."""
  lines = [x for x in record.get("history", ()) if x["split"] != "train"]
  return [x for x in lines if x["split"] == lines[0]["split"]][-1]
