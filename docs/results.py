"""The tables and pictures of a page of results, made again from its records.

    python -m docs.results docs/results.md

A page has comments around each table, and this command writes what is between them:

    <!-- solved: results/capacity.jsonl.xz -->
    <!-- end -->

is the table `solved` of the records in that file. In a table of mechanisms, the columns
that a comment names get counts of solved seeds, and the others stay:

    <!-- overview: recall=results/capacity.jsonl.xz -->

and a `board` is one row a mechanism of several records, a column each:

    <!-- board: recall=results/capacity.jsonl.xz text=results/language.jsonl.xz -->

Of `recall=results/capacity.jsonl.xz+recall_discarded.jsonl.xz`, a row of the second
file, which is in the same folder, replaces one that solves the task with fewer seeds.

A picture `results/capacity.curves-recall.png` of the page is `plots/curves-recall.png`
of the report of these records.
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
"""Colours of a picture: its file is a fifth of one with all colours."""


def solved_seeds(task: Task) -> pd.DataFrame:
  """Seeds that solved a task, with columns for each point of `across`."""
  rows = task.ended
  varied = _differences(rows)
  content: dict[str, dict[str, str]] = {
    _name(row): {} for _, row in rows.iterrows()
  }
  columns: dict[str, None] = {}
  for place, row in rows.sort_values("across", kind="stable").iterrows():
    suffix = f", {varied[place]}" if varied[place] else ""
    cells = {f"{k}{suffix}": text for k, text in _seeds(task, row).items()}
    content[_name(row)] |= cells
    columns |= dict.fromkeys(cells)
  table = pd.DataFrame.from_dict(content, orient="index")
  return table[list(columns)].fillna(NOTHING)


def memory(task: Task) -> pd.DataFrame:
  """Seeds that solved a task, and KiB of cache and state of a sequence at its end."""
  content, varied = {}, _differences(task.ended)
  for place, row in task.ended.iterrows():
    kib = {"KiB": number(row["cache_bytes"] / 1024)}
    content[_name(row, varied[place])] = kib | _seeds(task, row)
  return pd.DataFrame.from_dict(content, orient="index")


def lengths(task: Task) -> pd.DataFrame:
  """The mean over seeds at the first and last length, and single seeds at the last."""
  means_by_length = (
    task.values_by_length.groupby(["row", "length"])["value"].mean().unstack()
  )
  varied = _differences(task.ended)
  content = {}
  for place, row in task.ended.iterrows():
    values = means_by_length.loc[row["row"]].iloc[[0, -1]]
    content[_name(row, varied[place])] = {
      **{f"at {length}": f"{100 * x:.1f} %" for length, x in values.items()},
      **_seeds(task, row),
    }
  return pd.DataFrame.from_dict(content, orient="index")


def length_means(task: Task) -> pd.DataFrame:
  """Mean at the trained length → at the longest, with single seeds there.

  A column for each point of `across`.
  """
  rows, points = task.ended, task.values_by_length
  varied = _differences(rows)
  trained = points[points["ratio"] == 1].groupby("row")["value"].mean()
  content: dict[str, dict[str, str]] = {}
  for place, row in rows.iterrows():
    spread = _seeds(task, row)["worst to best"]
    content.setdefault(_name(row), {})[varied[place]] = (
      f"{100 * trained[row['row']]:.0f} → {100 * row['mean']:.0f} ({spread})"
    )
  table = pd.DataFrame.from_dict(content, orient="index").fillna(NOTHING)
  return table[sorted(table.columns)]


def pairs(task: Task) -> pd.DataFrame:
  """Mean accuracy at each number of pairs to recall, and seeds that solved it."""
  limit = task.runs["solved_at"].astype(float).max()
  varied = _differences(task.ended)
  content: dict[str, dict[str, str]] = {}
  for place, row in task.ended.iterrows():
    points = task.values_by_pairs[task.values_by_pairs["row"] == row["row"]]
    content[_name(row, varied[place])] = {
      f"{number} pairs": f"{100 * values.mean():.0f} %, "
      f"{(values >= limit).sum()} of {len(values)}"
      for number, values in points.groupby("pairs")["value"]
    }
  return pd.DataFrame.from_dict(content, orient="index")


def means(task: Task) -> pd.DataFrame:
  """The mean over seeds of the metric that decides."""
  content, varied = {}, _differences(task.ended)
  for place, row in task.ended.iterrows():
    tied = f" {TIED}" if row["is_tied"] else ""
    content[_name(row, varied[place])] = {
      task.metric.replace("_", " "): f"{number(row['mean'])}{tied}",
      "worst to best": f"{number(row['worst'])} to {number(row['best'])}",
    }
  return pd.DataFrame.from_dict(content, orient="index")


def steps(task: Task) -> pd.DataFrame:
  """Seeds that solved a task at some step, and the median of their steps.

  With several points of `across`, a column for each of them.
  """
  table = tables.steps(task)
  assert table is not None
  frame = table.frame()
  rows = task.ended[task.ended["row"].isin(task.steps["row"])]
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
  "carried": length_means,
  "pairs": pairs,
  "means": means,
  "steps": steps,
}


def remade(text: str, folder: Path) -> str:
  """The text of a page with all its tables made again.

  Args:
    text: of the page.
    folder: of the page, where the paths of its records begin.

  Raises:
    KeyError: a comment names a table that is none of `KINDS`.
    ConfigError: a file of records is missing or damaged.
  """

  def table(match: re.Match[str]) -> str:
    begin, kind, source, old, end = match.groups()
    if kind == "overview":
      return f"{begin}{_overview(old, source.split(), folder)}\n{end}"
    if kind == "board":
      return f"{begin}{_markdown(board(source.split(), folder))}\n{end}"
    texts = []
    for name, task in _tasks(folder / source).items():
      content = KINDS[kind](task).rename_axis(name).reset_index()
      texts += _markdown(content), ""
    return begin + "\n".join(texts) + end

  return _MARKED.sub(table, text)


def board(sources: Sequence[str], folder: Path) -> pd.DataFrame:
  """One row a mechanism, a column for each of `column=file`, the first with its KiB.

  Of `column=file+other`, a row of the other file replaces one that solves less. A task
  with a test at other lengths has a column of the trained one, too. Marks: e, the rate
  is at the edge of its grid; h, halving had stopped the rate; p, parameters differ by
  more than 2 %; w, feed-forward layers are one wide.
  """
  table: dict[str, dict[str, str]] = {}
  columns: list[str] = []
  for place, source in enumerate(sources):
    column, _, files = source.partition("=")
    first, *_ = rows = _best_rows(files, folder)
    lengths = sorted(set(_points(first[0])["length"]))
    names = [f"{column} at {n}" for n in (lengths[:1] + lengths[1:][-1:])]
    names = names if len(lengths) > 1 else [column]
    columns += (["KiB"] if not place else []) + names
    for task, row, mark in rows:
      cells = table.setdefault(f"`{row['attention']}`", {})
      if not place:
        cells["KiB"] = number(row["cache_bytes"] / 1024)
      cells |= zip(names, _cells(task, row), strict=True)
      cells[names[0]] += _marks(row, mark)
  content = pd.DataFrame.from_dict(table, orient="index", columns=columns)
  return content.fillna(NOTHING).rename_axis("mechanism").reset_index()


def _best_rows(files: str, folder: Path) -> list[tuple[Task, Any, str]]:
  """Task, row of its summary and mark; of a mechanism in several files the best."""
  rows: dict[str, tuple[Task, Any, str]] = {}
  first, *others = files.split("+")
  paths = [folder / first, *((folder / first).with_name(x) for x in others)]
  for place, path in enumerate(paths):
    (task,) = _tasks(path).values()
    for _, row in task.ended[task.ended["width"] != DENSE].iterrows():
      other = rows.get(row["attention"])
      if other is None or row["solved"] > other[1]["solved"]:
        rows[row["attention"]] = task, row, "h" if place else ""
  return list(rows.values())


@functools.cache
def _points(task: Task) -> pd.DataFrame:
  """Points at the lengths of a task, of whole sequences if it answers every prefix."""
  is_mean = bool(remarks.old_metric_note(task.summary))
  return task.metric_at_lengths(_WHOLE if is_mean else task.metric)


def _cells(task: Task, row: Any) -> list[str]:
  """The mean of a row; or its solved seeds, at the first and last length if several."""
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


def _marks(row: Any, mark: str, shown: str = "ehpw") -> str:
  """What a reader must know of a row beside others, as some of the letters."""
  deviation = abs(row["parameters"] / row["dense_parameters"] - 1)
  marks = {
    "e": bool(row["at_edge"]),
    "h": mark == "h",
    "p": deviation > 0.02,
    "w": row["feed_forward"] == 1,
  }
  text = "".join(x for x, holds in marks.items() if holds and x in shown)
  return f" <sup>{text}</sup>" if text else ""


def draw(path: Path) -> None:
  """Draws every picture of a page whose records are there."""
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
          # The median cut would make thin lines of few hues alike.
          small = image.convert("RGB").quantize(
            _COLORS, Image.Quantize.MAXCOVERAGE
          )
          small.save(path.parent / f"{name}.{stem}.png", optimize=True)


@functools.cache
def _tasks(path: Path) -> dict[str, Task]:
  """What the records of a file found; several tables may be made of it."""
  head, run_records = archive.read(path)
  reference = head["comparison"].get("reference")
  return by_task(list(run_records.values()), head.get("plan") or {}, reference)


def _overview(old: str, sources: Sequence[str], folder: Path) -> str:
  """A table with its columns of counts made again."""
  header, align, *rows = (
    [cell.strip() for cell in line.strip("| ").split("|")]
    for line in old.splitlines()
  )
  table = pd.DataFrame(rows, columns=header)
  for source in sources:
    column, _, files = source.partition("=")
    rows = _best_rows(files, folder)
    counts: dict[str, list[str]] = {}
    for task, row, mark in sorted(rows, key=lambda one: one[1]["attention"]):
      # A variant of the same mechanism follows it.
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
  """Index of a row -> of its `across`, what not all rows have: 'features 16'."""
  points = [set(filter(None, text.split(", "))) for text in rows["across"]]
  shared = set.intersection(*points)
  texts = [
    ", ".join(part for part in text.split(", ") if part not in shared)
    for text in rows["across"]
  ]
  return {
    place: re.sub("[=_]", " ", text)
    for place, text in zip(rows.index, texts, strict=True)
  }


def _seeds(task: Task, row: Any) -> dict[str, str]:
  """How many seeds solved the task, where it is all or nothing, and their range."""
  limit = task.runs["solved_at"].astype(float).max()
  worst, best = (_percent(row[name], limit) for name in ("worst", "best"))
  spread = f"{worst} %" if worst == best else f"{worst} to {best} %"
  if math.isnan(limit):
    return {"worst to best": spread}
  # Nobody is counted where no row has a seed that solved the task.
  solved = 0 if math.isnan(row["solved"]) else row["solved"]
  return {
    "solved": f"{solved:.0f} of {row['trials']:.0f}",
    "worst to best": spread,
  }


def _percent(share: float, limit: float) -> str:
  """Whole, but for what would be rounded to the other side of `limit`."""
  text = f"{100 * share:.0f}"
  is_kept = (float(text) >= 100 * limit) == (share >= limit)
  return text if is_kept else f"{100 * share:.1f}"


def _markdown(table: pd.DataFrame, align: Sequence[str] = ()) -> str:
  """As text, without the spaces that align columns."""
  align = align or ["---", *["--:"] * (len(table.columns) - 1)]
  rows = [list(table.columns), align, *table.values.tolist()]
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


if __name__ == "__main__":
  for _name_of_page in sys.argv[1:]:
    _page = Path(_name_of_page)
    _remade = remade(_page.read_text("utf-8"), _page.parent)
    _page.write_text(_remade, "utf-8")
    draw(_page)
