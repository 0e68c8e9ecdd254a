"""Everything that a comparison has found, as files for a reader and for programs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
import re
import time
from typing import Any

import pandas as pd

from comparison import records, status
from comparison.analysis import frame, remarks
from comparison.analysis import summary as summary_lib
from comparison.analysis.task import Task, divided
from comparison.records import Record
from comparison.report import figures, maps, page, style, tables
from comparison.report.lines import Styles
from comparison.report.page import Picture, Section, anchor
from comparison.report.tables import Table
from settings.errors import one_line
from training import atomic, metrics, ownership

PAGE, TEXT, TABLES = "report.html", "report.md", "report.tex"
PLOTS = "plots"
TITLE = "Attention mechanisms compared"

_SHARE = 0.02
"""Reports on a running comparison take at most this share of its time."""

_LATEX_COLUMNS = 6

READING = (
  "The first column is the metric that decides, on the last held-out split; rows are "
  "sorted by it. Behind a mean is its 95 % interval over seeds (Student's t; on the "
  "logit scale for a metric with two bounds). Where a task is all or nothing, rows "
  "are counted instead: 'solved 5 of 8' seeds, with Wilson's interval of the share, "
  "beside the mean and the best seed; where a task answers every prefix, by the last "
  f"position. {tables.TIED} marks the first row and those that "
  "cannot be told from it at 5 %: Student's t paired by seed, of counts Fisher's "
  "exact test, in both cases with Holm's correction over the rows of the table. Three "
  "seeds tell few rows apart, and of counts none: 3 of 3 against 0 of 3 is p = 0.1."
)


def write(workdir: Path) -> str:
  """Writes the tables, plots/ and the reports of what there is so far.

  results.csv and results.jsonl have a row a run, summary.csv a row a mechanism,
  curves.csv a row for each number of each evaluation.

  Args:
    workdir: of the comparison.

  Returns:
    The text of report.md.
  """
  run_records, _ = records.read(workdir)
  scaling = metrics.read(workdir, records.SCALING)  # Of `benchmarks.scaling`.
  runs, curves = frame.runs(run_records), frame.curves(run_records)
  summary = summary_lib.summarize(runs)
  runs.to_csv(workdir / "results.csv", index=False)
  runs.to_json(workdir / "results.jsonl", orient="records", lines=True)
  summary.to_csv(workdir / "summary.csv", index=False)
  curves.to_csv(workdir / "curves.csv", index=False)
  tasks = divided(run_records, runs, curves, summary)
  findings = [
    f"{name}: {summary_lib.finding(task.summary)}"
    for name, task in tasks.items()
  ]
  sections = [
    Section(
      "What was found",
      [*status.missing(workdir), *(findings or [summary_lib.NOTHING_FOUND])],
    ),
    Section("How to read this", [*_setup(workdir, run_records), READING]),
  ]
  references = records.references(workdir)
  mechanisms = [row["mechanism"] for row in scaling]
  styles = style.styles(
    [*(record["attention"] for record in run_records), *mechanisms]
  )
  with style.look():
    for name, task in tasks.items():
      parts = _parts(task, styles)
      if lines := references.get(name):
        parts.insert(0, _references(lines))
      sections.append(Section(name, parts))
    if scaling:
      caption = "Attention alone, measured by `python -m benchmarks.scaling`."
      parts = [
        Picture(stem, figure, caption)
        for stem, figure in figures.scaling(scaling, styles).items()
      ]
      sections.append(Section("Scaling", parts))
  pictures = [p for s in sections for p in s.parts if isinstance(p, Picture)]
  page.save(workdir / PLOTS, pictures)
  machine = _machine(runs)
  text = markdown(TITLE, machine, sections)
  # Whoever has the page open may read it again at any time.
  atomic.write_text(workdir / TEXT, text)
  atomic.write_text(workdir / TABLES, _latex(tasks))
  atomic.write_text(
    workdir / PAGE, page.render(TITLE, machine, sections, workdir / PLOTS)
  )
  return text


def meanwhile(workdir: Path) -> Callable[[], None]:
  """What a comparison calls after each run, to keep its report up to date.

  After a report it writes none until 50 times as long has passed as that one took.
  A fault is printed, and stops nothing.

  Args:
    workdir: of the comparison.
  """
  due = time.monotonic()

  def refresh() -> None:
    nonlocal due
    start = time.monotonic()
    if start < due:
      return
    try:
      write(workdir)
    except Exception as error:  # No run is lost for a page.
      print(f"  no report: {one_line(error)}; the runs go on", flush=True)
    due = start + (time.monotonic() - start) / _SHARE

  return refresh


def markdown(title: str, byline: str, sections: Sequence[Section]) -> str:
  """The sections of a page as text: tables, and links to plots/."""
  lines = [f"# {title}", "", f"{_inert(byline)}.", ""]
  for section in sections:
    lines += [f"## {_inert(section.title)}", ""]
    for part in section.parts:
      if isinstance(part, str):
        lines += [_inert(part), ""]
      elif isinstance(part, Picture):
        lines += [f"![{_inert(part.caption)}]({PLOTS}/{part.stem}.png)", ""]
      elif isinstance(part, list):
        lines += [*(f"- {_inert(note)}" for note in part), ""]
      else:
        lines += [f"### {_inert(part[0])}", "", *_markdown_table(part[1]), ""]
  return "\n".join(lines).rstrip() + "\n"


_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|(?<=\])\(")


def _inert(text: str) -> str:
  """A text on one line, in which a name of a file is neither HTML nor a link."""
  return _MARKUP.sub(lambda found: f"\\{found[0]}", " ".join(text.splitlines()))


def _markdown_table(table: Table) -> list[str]:
  lines = []
  if table.shared:
    shared = "; ".join(f"{k} {text}" for k, text in table.shared.items())
    lines += [_inert(f"All rows: {shared}."), ""]
  texts = table.frame().map(lambda text: _inert(text).replace("|", "\\|"))
  texts.columns = list(map(_inert, table.header))
  alignment = ["left", *["right"] * (len(table.header) - 1)]
  lines += [
    texts.to_markdown(index=False, disable_numparse=True, colalign=alignment)
  ]
  return [*lines, "", table.legend] if table.legend else lines


def _parts(task: Task, styles: Styles) -> list[Any]:
  """Parts of a task's section: tables, pictures, notes."""

  def picture(kind: str, figure: Any, caption: str) -> Picture:
    return Picture(f"{kind}-{anchor(task.name)}", figure, caption)

  map_figure, map_note = maps.task_map(task)
  parts: list[Any] = [
    ("Quality", tables.quality(task.summary)),
    remarks.row_model(task) or None,
    picture("seeds", figures.seeds(task, styles), "Every seed is a dot."),
    picture(
      "curves",
      figures.learning_curves(task, styles),
      "Learning curves, a line a seed.",
    ),
    ("Paired over sentences", tables.bleu(task)),
    ("Other lengths", tables.lengths(task)),
    ("Whole sequences at other lengths", tables.whole_sequences(task)),
    picture(
      "lengths",
      figures.lengths(task, styles),
      "Quality at other lengths than the trained one, a line a seed.",
    ),
    ("Cost", tables.cost(task.summary)),
    picture(
      "quality-cost",
      figures.quality_cost(task, styles),
      "Quality against cost, a dot a seed.",
    ),
    picture(
      "capacity",
      figures.capacity(task, styles),
      "Quality against what is kept of a sequence while it is generated.",
    ),
    picture(
      "pairs",
      figures.pairs(task, styles),
      "Recall against the number of pairs, a dot a seed.",
    ),
    picture(
      "maps", map_figure, "What every row attends to in one held-out example."
    ),
  ]
  # What a part shows is its second field; some tasks have nothing to show there.
  parts = [part for part in parts if part is not None and part[1] is not None]
  notes = [*remarks.doubts(task), *remarks.notes(task)]
  notes += [map_note] * bool(map_note)
  return [*parts, notes] if notes else parts


def _setup(workdir: Path, run_records: Sequence[Record]) -> list[str]:
  """What all runs share, and how the shown point of a grid was chosen."""
  shared = records.shared(workdir)
  parts = []
  if shared.get("match_parameters"):
    parts.append(
      "All models of a task have the parameters of the one with dense attention, as "
      "nearly as the width of their feed-forward layers allows."
    )
  elif "match_parameters" in shared:
    parts.append(
      "Parameters are not matched: each model is as its config has it."
    )
  if seconds := shared.get("budget_seconds"):
    parts.append(f"Every run trains for {seconds:g} s.")
  if operations := shared.get("budget_flops"):
    parts.append(f"Every run trains for {operations:.3g} operations.")
  grid = {k: v for k, v in shared.items() if k.startswith("grid.")}
  if grid:
    points = " × ".join(f"`{k[5:]}` ∈ {v}" for k, v in grid.items())
    choosers = "the seeds that are reported"
    if any(record.get("choosing") for record in run_records):
      choosers = "seeds of their own"
    # Of an older version, where the first seed chose at the rungs.
    elif "halving.rungs" in shared and shared.get("halving.seeds") != "all":
      choosers = "the first seed, which is reported as well,"
    split = next(
      (s for s in (frame.splits(r)[0] for r in run_records) if s), "first"
    )
    parts.append(
      f"Each row has the point of {points} that {choosers} preferred on the {split} "
      "split."
    )
  exclusions = ("tasks", "match_parameters", "budget_seconds", "budget_flops")
  exclusions += (ownership.DATA,)
  leaves = [
    f"`{leaf} = {value}`"
    for leaf, value in shared.items()
    if leaf not in exclusions
    and not leaf.startswith(("grid.", "across.", "halving."))
  ]
  if leaves:
    parts.append(f"Set for all runs: {', '.join(leaves)}.")
  return [" ".join(parts)] if parts else []


def _machine(runs: pd.DataFrame) -> str:
  """What the runs were made on, as far as they tell."""
  parts = []
  for name in ("device", "cpu", "cores", "jax", "commit"):
    values = (
      sorted({str(x) for x in runs[name].dropna()}) if name in runs else []
    )
    if values:
      text = ", ".join(x[:12] if name == "commit" else x for x in values)
      parts.append(text if name in ("device", "cpu") else f"{name} {text}")
  return "; ".join(parts)


def _references(references: Mapping[str, Mapping[str, float]]) -> str:
  """`From elsewhere: nanoGPT loss 1.88.`"""
  results = ", ".join(
    f"{source} {metric} {value:g}"
    for source, values in references.items()
    for metric, value in values.items()
  )
  return f"From elsewhere: {results}."


_ESCAPED = {ord(x): f"\\{x}" for x in "&%$#_{}"} | {
  ord("\\"): r"\textbackslash{}",
  ord("~"): r"\textasciitilde{}",
  ord("^"): r"\textasciicircum{}",
}
"""How LaTeX writes what it reads otherwise; pandas escapes cells and no caption."""


def _latex(tasks: Mapping[str, Task]) -> str:
  """A table a task, with booktabs: name, result and what a paper has room for."""
  texts = []
  for name, task in tasks.items():
    quality, cost = tables.quality(task.summary), tables.cost(task.summary)
    cells = quality.frame()
    if cost is not None:
      cost_cells = cost.frame().drop(columns=cost.header[1])
      cells = cells.merge(
        cost_cells, "left", quality.header[0], suffixes=("", "_")
      )
    titles = ["parameters", "learning rate", "step, ms", "cache and state, KiB"]
    columns = [*quality.header[:2], *(c for c in titles if c in cells)]
    latex = cells[columns[:_LATEX_COLUMNS]].fillna(tables.NOTHING)
    texts.append(
      latex.style.hide(axis="index")
      .format(escape="latex")
      .format_index(escape="latex", axis=1)
      .to_latex(
        column_format="l" + "r" * (len(latex.columns) - 1),
        hrules=True,
        caption=name.translate(_ESCAPED),
        environment="table",
      )
    )
  return "\n".join(texts).replace(tables.TIED, "$\\approx$")
