"""Regenerates the tables and pictures of a page of results from its records.

    python -m docs.results docs/results.md

A page encloses each table in comments, and this command writes the lines between them.
The table `solved` of the records in a file:

    <!-- solved: results/capacity.jsonl.xz -->
    <!-- end -->

A table of mechanisms, of which only the named columns are replaced, by counts of solved
seeds:

    <!-- overview: recall=results/capacity.jsonl.xz -->

A table with one row per mechanism and one column per file of records:

    <!-- board: recall=results/capacity.jsonl.xz text=results/language.jsonl.xz -->

In `recall=results/capacity.jsonl.xz+recall_discarded.jsonl.xz`, a row of the second
file replaces one that solves the task with fewer seeds. Both files are in one folder.

The picture `results/capacity.curves-recall.png` is `plots/curves-recall.png` of the
report of these records.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from pathlib import Path
import re
import sys
import tempfile
from typing import Any

import pandas as pd
from PIL import Image

from comparison import archive
from comparison.analysis import remarks
from comparison.analysis.sentences import number
from comparison.analysis.task import Task, by_task
from comparison.planned_run import COUNTERPART, DENSE
from comparison.report import files, tables
from comparison.report.tables import NOTHING, TIED

_MARKED = re.compile(
  r"(<!-- (\w+): ([^>]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL
)
_PICTURE = re.compile(r"\]\(([^()\s:]+?)\.([^()\s:]+?)\.png\)")

_WHOLE = "sequence_accuracy"
_COLORS = 64
"""Colours of a picture, which reduce its file to a fifth."""


def solved_seeds(task: Task) -> pd.DataFrame:
  """Returns the seeds that solved a task, with columns per point of `across`."""
  rows = task.finished_rows
  varied = _differences(rows)
  content: dict[str, dict[str, str]] = {
    _name(row): {} for _, row in rows.iterrows()
  }
  columns: dict[str, None] = {}
  for index, row in rows.sort_values("across", kind="stable").iterrows():
    suffix = f", {varied[index]}" if varied[index] else ""
    cells = {f"{k}{suffix}": text for k, text in _seeds(task, row).items()}
    content[_name(row)] |= cells
    columns |= dict.fromkeys(cells)
  table = pd.DataFrame.from_dict(content, orient="index")
  return table[list(columns)].fillna(NOTHING)


def memory(task: Task) -> pd.DataFrame:
  """Returns the seeds that solved a task, and the KiB of one full cache."""
  content, varied = {}, _differences(task.finished_rows)
  for index, row in task.finished_rows.iterrows():
    kib = {"KiB": number(row["cache_bytes"] / 1024)}
    content[_name(row, varied[index])] = kib | _seeds(task, row)
  return pd.DataFrame.from_dict(content, orient="index")


def lengths(task: Task) -> pd.DataFrame:
  """Returns means over seeds at the first and last length, and the last range."""
  means_by_length = (
    task.values_by_length.groupby(["row", "length"])["value"].mean().unstack()
  )
  varied = _differences(task.finished_rows)
  content = {}
  for index, row in task.finished_rows.iterrows():
    values = means_by_length.loc[row["row"]].iloc[[0, -1]]
    content[_name(row, varied[index])] = {
      **{f"at {length}": f"{100 * x:.1f} %" for length, x in values.items()},
      **_seeds(task, row),
    }
  return pd.DataFrame.from_dict(content, orient="index")


def length_means(task: Task) -> pd.DataFrame:
  """Returns the mean at the trained length → at the longest, with its range.

  There is one column per point of `across`.
  """
  rows, points = task.finished_rows, task.values_by_length
  varied = _differences(rows)
  trained = points[points["ratio"] == 1].groupby("row")["value"].mean()
  content: dict[str, dict[str, str]] = {}
  for index, row in rows.iterrows():
    value_range = _seeds(task, row)["worst to best"]
    content.setdefault(_name(row), {})[varied[index]] = (
      f"{100 * trained[row['row']]:.0f} → {100 * row['mean']:.0f} ({value_range})"
    )
  table = pd.DataFrame.from_dict(content, orient="index").fillna(NOTHING)
  return table[sorted(table.columns)]


def pairs(task: Task) -> pd.DataFrame:
  """Returns the mean accuracy and the solved seeds per number of pairs to recall."""
  limit = task.runs["solved_at"].astype(float).max()
  varied = _differences(task.finished_rows)
  content: dict[str, dict[str, str]] = {}
  for index, row in task.finished_rows.iterrows():
    points = task.values_by_pairs[task.values_by_pairs["row"] == row["row"]]
    content[_name(row, varied[index])] = {
      f"{number} pairs": f"{100 * values.mean():.0f} %, "
      f"{(values >= limit).sum()} of {len(values)}"
      for number, values in points.groupby("pairs")["value"]
    }
  return pd.DataFrame.from_dict(content, orient="index")


def means(task: Task) -> pd.DataFrame:
  """Returns the mean over seeds of the metric that ranks the rows."""
  content, varied = {}, _differences(task.finished_rows)
  for index, row in task.finished_rows.iterrows():
    tied = f" {TIED}" if row["is_tied"] else ""
    content[_name(row, varied[index])] = {
      task.metric.replace("_", " "): f"{number(row['mean'])}{tied}",
      "worst to best": f"{number(row['worst'])} to {number(row['best'])}",
    }
  return pd.DataFrame.from_dict(content, orient="index")


def steps(task: Task) -> pd.DataFrame:
  """Returns the seeds that solved a task at some step, and their median step.

  Several points of `across` have one column each.
  """
  table = tables.steps(task)
  assert table is not None
  frame = table.frame()
  rows = task.finished_rows[task.finished_rows["row"].isin(task.steps["row"])]
  frame.insert(1, "KiB", [number(x / 1024) for x in rows["cache_bytes"]])
  names = [_name(row) for _, row in rows.iterrows()]
  frame = frame.drop(columns="mechanism").set_axis(names)
  varied = _differences(rows)
  if not any(varied.values()):
    return frame
  cells = frame["solved at some step"] + ", " + frame["median steps"]
  by_point = pd.DataFrame(
    {"name": names, "point": list(varied.values()), "cell": list(cells)}
  )
  matrix = by_point.pivot(index="name", columns="point", values="cell")
  return matrix.reindex(list(dict.fromkeys(names))).fillna(NOTHING)


KINDS: Mapping[str, Callable[[Task], pd.DataFrame]] = {
  "solved": solved_seeds,
  "memory": memory,
  "lengths": lengths,
  "length_means": length_means,
  "pairs": pairs,
  "means": means,
  "steps": steps,
}


def regenerate(text: str, folder: Path) -> str:
  """Returns the text of a page with all its tables regenerated.

  Args:
    text: the text of the page.
    folder: the folder of the page; the paths of records are relative to it.

  Raises:
    KeyError: a comment names a table that is not in `KINDS`.
    ConfigError: a file of records is missing or damaged.
  """

  def table(match: re.Match[str]) -> str:
    start, kind, source, old, end = match.groups()
    if kind == "overview":
      return f"{start}{_overview(old, source.split(), folder)}\n{end}"
    if kind == "board":
      return f"{start}{_markdown(board(source.split(), folder))}\n{end}"
    texts = []
    for name, task in _tasks(folder / source).items():
      content = KINDS[kind](task).rename_axis(name).reset_index()
      texts += _markdown(content), ""
    return start + "\n".join(texts) + end

  return _MARKED.sub(table, text)


def board(sources: Sequence[str], folder: Path) -> pd.DataFrame:
  """Returns one row per mechanism and one column per `column=file`.

  The first column is preceded by the KiB of a full cache. In `column=file+other`, a
  row of the other file replaces one with fewer solved seeds. A task that is tested at
  other lengths has a second column for the longest. Marks: e, the learning rate is at
  the edge of its grid; h, halving had stopped this rate; p, parameter counts differ by
  more than 2 %; w, feed-forward layers have width 1.
  """
  table: dict[str, dict[str, str]] = {}
  columns: list[str] = []
  for index, source in enumerate(sources):
    column, _, files = source.partition("=")
    first, *_ = rows = _best_rows(files, folder)
    lengths = sorted(set(_points(first[0])["length"]))
    names = [f"{column} at {n}" for n in (lengths[:1] + lengths[1:][-1:])]
    names = names if len(lengths) > 1 else [column]
    columns += (["KiB"] if not index else []) + names
    for task, row, mark in rows:
      cells = table.setdefault(f"`{row['attention']}`", {})
      if not index:
        cells["KiB"] = number(row["cache_bytes"] / 1024)
      cells |= zip(names, _cells(task, row), strict=True)
      cells[names[0]] += _marks(row, mark)
  content = pd.DataFrame.from_dict(table, orient="index", columns=columns)
  return content.fillna(NOTHING).rename_axis("mechanism").reset_index()


def _best_rows(files: str, folder: Path) -> list[tuple[Task, Any, str]]:
  """Returns task, summary row and mark of each mechanism's best row in the files."""
  rows: dict[str, tuple[Task, Any, str]] = {}
  first, *others = files.split("+")
  paths = [folder / first, *((folder / first).with_name(x) for x in others)]
  for index, path in enumerate(paths):
    (task,) = _tasks(path).values()
    for _, row in task.finished_rows[
      task.finished_rows["width"] != DENSE
    ].iterrows():
      other = rows.get(row["attention"])
      if other is None or row["solved"] > other[1]["solved"]:
        rows[row["attention"]] = task, row, "h" if index else ""
  return list(rows.values())


@functools.cache
def _points(task: Task) -> pd.DataFrame:
  """Returns the metric at each length, of whole sequences for older records."""
  is_mean = bool(remarks.old_metric_note(task.summary))
  return task.metric_at_lengths(_WHOLE if is_mean else task.metric)


def _cells(task: Task, row: Any) -> list[str]:
  """Returns the solved seeds at the first and last length, or the mean of a row."""
  if math.isnan(row["solved_at"]):
    return [number(row["mean"])]
  points = _points(task)
  lengths = sorted(set(points["length"]))
  if len(lengths) < 2:
    return [_seeds(task, row)["solved"]]
  values = points[points["row"] == row["row"]].groupby("length")["value"]
  return [
    f"{(group >= row['solved_at']).sum()} of {row['trials']}"
    for group in (values.get_group(n) for n in (lengths[0], lengths[-1]))
  ]


def _marks(row: Any, mark: str, letters: str = "ehpw") -> str:
  """Returns those of `letters` that apply to a row; `board` explains them."""
  deviation = abs(row["parameters"] / row["dense_parameters"] - 1)
  marks = {
    "e": bool(row["at_edge"]),
    "h": mark == "h",
    "p": deviation > 0.02,
    "w": row["feed_forward"] == 1,
  }
  text = "".join(x for x in letters if marks[x])
  return f" <sup>{text}</sup>" if text else ""


def draw(path: Path) -> None:
  """Draws every picture of a page that has records."""
  pictures: dict[str, list[str]] = {}
  for name, stem in _PICTURE.findall(path.read_text("utf-8")):
    pictures.setdefault(name, []).append(stem)
  for name, stems in pictures.items():
    with tempfile.TemporaryDirectory() as folder:
      workdir = Path(folder) / "comparison"
      archive.unpack(path.parent / f"{name}.jsonl.xz", workdir)
      files.write(workdir)
      for stem in stems:
        with Image.open(workdir / files.PLOTS / f"{stem}.png") as image:
          # Median cut, the default, would merge the hues of thin lines.
          small = image.convert("RGB").quantize(
            _COLORS, Image.Quantize.MAXCOVERAGE
          )
          small.save(path.parent / f"{name}.{stem}.png", optimize=True)


@functools.cache
def _tasks(path: Path) -> dict[str, Task]:
  """Reads the tasks of a file of records."""
  head, run_records = archive.read(path)
  reference = head["comparison"].get("reference")
  return by_task(list(run_records.values()), head.get("plan") or {}, reference)


def _overview(old: str, sources: Sequence[str], folder: Path) -> str:
  """Returns a table with its columns of counts regenerated."""
  header, align, *rows = (
    [cell.strip() for cell in line.strip("| ").split("|")]
    for line in old.splitlines()
  )
  table = pd.DataFrame(rows, columns=header)
  for source in sources:
    column, _, files = source.partition("=")
    rows = _best_rows(files, folder)
    counts: dict[str, list[str]] = {}
    for task, row, mark in sorted(rows, key=lambda x: x[1]["attention"]):
      # A star marks a variant of the mechanism.
      star = "" if row["attention"] == row["slots"] else "*"
      cell = _cells(task, row)[-1] + star + _marks(row, mark, "eh")
      counts.setdefault(f"`{row['slots']}`", []).append(cell)
    table[column] = [
      ", ".join(counts.get(name, [NOTHING])) for name in table.iloc[:, 0]
    ]
  return _markdown(table, align)


def _name(row: Any, across: str = "") -> str:
  counterpart = COUNTERPART if row["width"] == DENSE else ""
  return ", ".join(filter(None, (f"`{row['attention']}`", across, counterpart)))


def _differences(rows: pd.DataFrame) -> dict[Any, str]:
  """Returns row index -> the parts of its `across` that not all rows share."""
  points = [set(filter(None, text.split(", "))) for text in rows["across"]]
  shared = set.intersection(*points)
  texts = [
    ", ".join(part for part in text.split(", ") if part not in shared)
    for text in rows["across"]
  ]
  return {
    index: re.sub("[=_]", " ", text)
    for index, text in zip(rows.index, texts, strict=True)
  }


def _seeds(task: Task, row: Any) -> dict[str, str]:
  """Returns the range of a row's seeds and, if the task has a limit, who solved it."""
  limit = task.runs["solved_at"].astype(float).max()
  worst, best = (_percent(row[name], limit) for name in ("worst", "best"))
  value_range = f"{worst} %" if worst == best else f"{worst} to {best} %"
  if math.isnan(limit):
    return {"worst to best": value_range}
  # The summary has no counts if no row has a seed that solved the task.
  solved = 0 if math.isnan(row["solved"]) else row["solved"]
  return {
    "solved": f"{solved:.0f} of {row['trials']:.0f}",
    "worst to best": value_range,
  }


def _percent(share: float, limit: float) -> str:
  """Formats a percentage, with a decimal only if rounding would cross `limit`."""
  text = f"{100 * share:.0f}"
  same_side = (float(text) >= 100 * limit) == (share >= limit)
  return text if same_side else f"{100 * share:.1f}"


def _markdown(table: pd.DataFrame, align: Sequence[str] = ()) -> str:
  """Formats a table without the spaces that align columns."""
  align = align or ["---", *["--:"] * (len(table.columns) - 1)]
  rows = [list(table.columns), align, *table.values.tolist()]
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
  for _page in map(Path, sys.argv[1:]):
    _text = regenerate(_page.read_text("utf-8"), _page.parent)
    _page.write_text(_text, "utf-8")
    draw(_page)
