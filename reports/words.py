"""What a comparison held equal, and what its tables cannot say in numbers."""

from collections.abc import Iterable, Mapping, Sequence
import re
from typing import Any

from comparison.plan import BASELINE
from comparison.records import Record
from reports import numbers, quality, table
from reports.columns import COSTS, Column
from reports.summary import ALONE, Summary, summarize

TITLE = "Attention mechanisms compared"
INTERVALS = (
  "Numbers are means over seeds ± half the 95 % interval of Student's t; one "
  "seed has none. Of a metric with two bounds (0 to 1 for an accuracy) the interval "
  "is taken on the logit scale, which it cannot leave, and given by its ends where "
  f"it is uneven, as [0.93, 0.99]. {numbers.TIED} marks the best mean and those that cannot "
  "be told apart from it (Welch's t-test at 5 %, on the same scale, without a "
  "correction for the number of rows)."
)

_NARROWEST = "--config.model.mlp_features=1"
_EQUAL = 0.01
"""Share by which parameters may differ where they could be matched."""

_SHARED = (
  f"{numbers.SHARED} stands behind times of runs that shared their machine: other "
  f"programs kept more than {ALONE} cores busy meanwhile."
)

_TEXTS = {
  "slots": "the mechanism of each attention of the model as it ran: encoder · "
  "decoder · cross-attention, or the only one; a config puts dense where the "
  "mechanism of the row cannot serve",
  "options": "of the mechanism, as the config has them; what is not there is as "
  "the mechanism has it",
}


def machine(found: Sequence[Record]) -> str:
  """What the runs were measured on, as far as they tell."""
  measured = [record.get("measured", {}) for record in found]
  devices = sorted({m["device"] for m in measured if m.get("device")})
  versions = sorted({m["jax"] for m in measured if m.get("jax")})
  return "; ".join([*devices, *(f"jax {version}" for version in versions)])


def setup(shared: Mapping[str, Any], found: Sequence[Record]) -> list[str]:
  """What all runs share: a sentence each for parameters, budget, optimiser.

  Args:
    shared: of the comparison, leaf -> value; empty where it is not known.
    found: its records.
  """
  matched = (
    "All models of a task have the parameters of the one with dense attention, "
    "as nearly as the width of their feed-forward layers allows."
    if shared.get("match_parameters")
    else "Parameters are not matched: each model is as its config has it."
  )
  sentences = [matched] if "match_parameters" in shared else []
  if seconds := shared.get("budget_seconds"):
    sentences.append(
      f"Every run trains for {seconds:g} s, compiling and evaluating aside."
    )
  if operations := shared.get("budget_flops"):
    sentences.append(
      f"Every run trains for {operations:.3g} floating-point operations."
    )
  if any(
    (table.value(record, column.others) or 0.0) > ALONE
    for record in found
    for column in COSTS
    if column.others
  ):
    sentences.append(_SHARED)
  sentences += _across(found, bool(shared.get("match_parameters")))
  sentences.append(_optimizer(found, shared))
  return [*sentences, *_leaves(shared)]


def notes(
  summaries: Sequence[Summary],
  columns: Sequence[Column],
  shared: Mapping[str, Any],
) -> list[str]:
  """Why a row misses a value or runs, and which could not be made equal.

  Args:
    summaries: of a task.
    columns: what is shown of each.
    shared: of the comparison, leaf -> value; empty where it is not known.
  """
  lines = _unmatched(summaries) if shared.get("match_parameters") else []
  for one in summaries:
    name = f"`{one.label}`"
    failed = [run for run in one.runs if "final" not in run]
    if failed and one.done:
      lines.append(
        f"{name}: {len(failed)} of {len(one.runs)} runs {failed[0]['status']}: "
        f"{failed[0]['reason']}"
      )
    reasons = [run.get("reason") for run in one.done]
    lines += [
      f"{name} is not measured: {reason}" for reason in _unique(reasons)
    ]
    for column in columns:
      why = [
        run.get("measured", {}).get("notes", {}).get(column.name)
        for run in one.done
      ]
      lines += [f"{name}, {column.title}: {reason}" for reason in _unique(why)]
  return lines


def meanings(columns: Sequence[Column], texts: Iterable[str]) -> dict[str, str]:
  """Title with its unit -> what it means, each column once.

  Args:
    columns: of numbers.
    texts: of `summary.TEXTS`.
  """
  found = {name: _TEXTS[name] for name in texts}
  found["seeds"] = "runs that were trained to their end / runs of the plan"
  for column in columns:
    found.setdefault(titled(column), column.meaning)
  return found


def titled(column: Column) -> str:
  """`step, ms`."""
  return f"{column.title}, {column.unit}" if column.unit else column.title


def grid_leaves(summaries: Sequence[Summary]) -> list[str]:
  """Leaves of the grid, in the order of their names."""
  return sorted({leaf for one in summaries for leaf in one.grid})


def across_leaves(summaries: Iterable[Summary]) -> list[str]:
  """Leaves that make rows of one mechanism, in the order of their names."""
  return sorted({leaf for one in summaries for leaf in one.across})


def short(leaf: str) -> str:
  """The last part of a leaf's name: 'features' of 'model.features'."""
  return leaf.rpartition(".")[2]


def joined(*parts: str) -> str:
  """The parts that are not empty, with commas."""
  return ", ".join(filter(None, parts))


def stem(text: str) -> str:
  """A name of a file or an anchor for a task: 'paper/needle' is two words."""
  return re.sub(r"[^\w.-]+", "-", text)


def beside(label: str) -> str:
  """A mechanism's label beside a line: of an import path, the module and name."""
  path, colon, name = label.partition(":")
  return path.rpartition(".")[2] + colon + name if colon else label


def _values(found: Sequence[Record], field: str) -> dict[str, list[Any]]:
  """Leaf -> what the records have for it, of 'grid' or 'across'."""
  values: dict[str, list[Any]] = {}
  for record in found:
    for leaf, value in record.get(field, {}).items():
      values.setdefault(leaf, []).append(value)
  return dict(sorted(values.items()))


def _points(found: Sequence[Record], field: str) -> str:
  """`LEAF` ∈ {values} × …, of 'grid' or 'across'; empty without any."""
  return " × ".join(
    f"`{leaf}` ∈ {{{', '.join(sorted(set(map(_text, of)), key=numbers.by_size))}}}"
    for leaf, of in _values(found, field).items()
  )


def _across(found: Sequence[Record], is_matched: bool) -> list[str]:
  points = _points(found, "across")
  if not points:
    return []
  told = (
    f"Every mechanism ran with every combination of {points}; each is a row."
  )
  if is_matched:
    told += " Its parameters are those of dense attention with the same values."
  return [told]


def _unmatched(summaries: Sequence[Summary]) -> list[str]:
  """Rows whose feed-forward layers had to become as narrow as they can be."""
  baselines = {
    one.point: one.runs[0]["parameters"]
    for one in summaries
    if one.attention == BASELINE
  }
  lines = []
  for one in summaries:
    parameters, baseline = one.runs[0]["parameters"], baselines.get(one.point)
    if _NARROWEST not in one.runs[0].get("arguments", ()):
      continue
    line = f"`{one.label}`: its feed-forward layers have a width of 1"
    if baseline and parameters > (1 + _EQUAL) * baseline:
      more = 100 * (parameters / baseline - 1)
      line += f", and it still has {more:.0f} % more parameters than `dense`"
    lines.append(line)
  return lines


def _optimizer(found: Sequence[Record], shared: Mapping[str, Any]) -> str:
  grid = _points(found, "grid")
  if not grid:
    return (
      "Optimiser settings are those of the task's config, the same for every "
      "mechanism."
    )
  ran = f"Every mechanism ran at every point of the grid {grid}"
  if rungs := shared.get("halving.rungs"):
    shares = " and ".join(f"{100 * share:.3g} %" for share in rungs)
    ran = (
      f"Every mechanism began at every point of the grid {grid} with every "
      f"seed; after {shares} of the steps the half with the higher mean loss was "
      "stopped"
    )
  return (
    f"{ran}; tables and plots show the point with the best mean over seeds of "
    f"the first metric in its table, {_chosen(found)}. {_at_edges(found)}All "
    "points are in results.csv."
  )


def _at_edges(found: Sequence[Record]) -> str:
  """How many rows chose the lowest or highest number of a leaf of the grid."""
  ends = {}
  for leaf, of in _values(found, "grid").items():
    # Of one or two values, all are at an edge.
    if all(map(quality.is_number, of)) and len(set(of)) > 2:
      ends[leaf] = (min(of), max(of))
  summaries = [one for of in summarize(found).values() for one in of]
  rows = [one for one in summaries if one.done and one.points > 1]
  edges = [
    one
    for one in rows
    if any(one.grid.get(leaf) in of for leaf, of in ends.items())
  ]
  if not edges:
    return ""
  return (
    f"{len(edges)} of {len(rows)} rows chose the lowest or the highest value "
    "of the grid, so that a wider one may do better. "
  )


def _chosen(found: Sequence[Record]) -> str:
  """Names the split that chooses the grid's point, and the one that is reported."""
  pairs: dict[tuple[str, str], list[str]] = {}
  for record in found:
    if "final" in record:
      tasks = pairs.setdefault(quality.splits(record), [])
      if record["task"] not in tasks:
        tasks.append(record["task"])
  told = []
  for (chosen_by, reported), tasks in pairs.items():
    by = f"chosen by the {chosen_by} split and reported on {reported}"
    if chosen_by == reported:
      by = f"chosen by the same split that it is reported on, {reported}"
    told.append(by + (f" ({', '.join(tasks)})" if len(pairs) > 1 else ""))
  return "; ".join(told) or "chosen by the first held-out split"


def _leaves(shared: Mapping[str, Any]) -> list[str]:
  """What differs from the files, for all runs and for those of a task."""
  told = {"tasks", "match_parameters", "budget_seconds", "budget_flops"}
  leaves: dict[str, list[str]] = {}
  for key in sorted(shared.keys() - told):
    where, _, leaf = key.partition(".")
    if where in ("grid", "across", "halving"):
      continue
    name, whose = key, "all runs"
    if where == "per_task":
      task, _, name = leaf.partition(".")
      whose = f"the runs of {task}"
    leaves.setdefault(whose, []).append(f"`{name} = {_text(shared[key])}`")
  return [f"Set for {whose}: {', '.join(of)}." for whose, of in leaves.items()]


def _text(value: Any) -> str:
  return f"{value:g}" if isinstance(value, float) else str(value)


def _unique(reasons: Sequence[str | None]) -> list[str]:
  return list(dict.fromkeys(reason for reason in reasons if reason))
