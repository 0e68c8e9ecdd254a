"""Writes the results of a comparison as files, for readers and for programs."""

from collections.abc import Callable, Mapping, Sequence
import json
from pathlib import Path
import re
import time
from typing import Any

import pandas as pd

from comparison import records, status
from comparison.analysis import frame, remarks, sentences
from comparison.analysis import summary as summary_lib
from comparison.analysis.task import Task, divide_by_task
from comparison.records import Record
from comparison.report import figures, maps, page, style, tables
from comparison.report.lines import Styles
from comparison.report.page import Picture, Section, anchor
from comparison.report.tables import Table
from settings import atomic
from settings.errors import one_line
from training import metrics, ownership

PAGE, TEXT, TABLES = "report.html", "report.md", "report.tex"
PLOTS = "plots"
TITLE = "Attention mechanisms compared"

_SHARE = 0.02
"""Largest share of the time of a comparison that intermediate reports take."""

_LATEX_COLUMNS = 6

READING = (
  "The first column is the main metric on the last held-out split; rows are "
  "sorted by it. A mean is followed by its 95 % interval over seeds (Student's t; on "
  "the logit scale for a metric with two bounds). If models either solve a task or "
  "fail, the column counts seeds instead: 'solved 5 of 8', with Wilson's interval of "
  "the share; further columns have the mean and the best seed. In a task with an "
  f"answer for every prefix, the last position counts. {tables.TIED} marks the first "
  "row, or the reference if one was declared, and the rows that do not differ from it "
  "significantly at 5 %; a line below each table names the test. If all rows of a "
  "table are equal, at least one loses its mark in at most 5 % of tables. Intervals of "
  "differences of means hold for all rows of a table at once, those of shares "
  "(Newcombe) for one row. A row that lacks planned seeds is 'so far' and is not "
  "compared; a seed that diverged is the worst."
)


def write(workdir: Path) -> str:
  """Writes the tables, plots/ and the reports of the results so far.

  results.csv and results.jsonl have one row per run, summary.csv has one row per
  mechanism, and curves.csv has one row per value of each evaluation.

  Args:
    workdir: folder of the comparison.

  Returns:
    The text of report.md.
  """
  run_records, _ = records.read(workdir)
  scaling = metrics.read(workdir, records.SCALING)  # Of `benchmarks.scaling`.
  runs, curves = frame.runs(run_records), frame.curves(run_records)
  reference = records.shared_settings(workdir).get("reference")
  summary = summary_lib.summarize(
    runs, records.planned_runs(workdir), reference
  )
  runs.to_csv(workdir / "results.csv", index=False)
  # pandas rounds to ten decimals, so 1e-12 would become 0.
  rows = [
    {str(name): None if pd.isna(x) else x for name, x in row.items()}
    for row in runs.astype(object).to_dict("records")
  ]
  lines = "".join(json.dumps(row) + "\n" for row in rows)
  atomic.write_text(workdir / "results.jsonl", lines)
  summary.to_csv(workdir / "summary.csv", index=False)
  curves.to_csv(workdir / "curves.csv", index=False)
  tasks = divide_by_task(run_records, runs, curves, summary)
  findings = [
    f"{name}: {sentences.finding(task.summary)}" for name, task in tasks.items()
  ]
  sections = [
    Section(
      "Findings",
      [*status.missing(workdir), *(findings or [sentences.NOTHING_FOUND])],
    ),
    Section("How to read this", [*_setup(workdir, run_records), READING]),
  ]
  references = records.read_references(workdir)
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
      caption = "Only the attention function, measured by `python -m benchmarks.scaling`."
      parts = [
        Picture(stem, figure, caption)
        for stem, figure in figures.scaling(scaling, styles).items()
      ]
      sections.append(Section("Scaling", parts))
  pictures = [p for s in sections for p in s.parts if isinstance(p, Picture)]
  page.save(workdir / PLOTS, pictures)
  machine = _machine(runs)
  text = markdown(TITLE, machine, sections)
  # Atomic, because a browser may reload the page at any time.
  atomic.write_text(workdir / TEXT, text)
  atomic.write_text(workdir / TABLES, _latex(tasks))
  atomic.write_text(
    workdir / PAGE, page.render(TITLE, machine, sections, workdir / PLOTS)
  )
  return text


def report_updater(workdir: Path) -> Callable[[], None]:
  """Returns a function that updates the report, which a comparison calls after runs.

  After a report that took t seconds, the next one follows at least 50 · t seconds later.
  Errors are printed, not raised.

  Args:
    workdir: folder of the comparison.
  """
  due = time.monotonic()

  def refresh() -> None:
    nonlocal due
    start = time.monotonic()
    if start < due:
      return
    try:
      write(workdir)
    except Exception as error:  # A report must not stop the runs.
      print(f"  no report: {one_line(error)}; the runs continue", flush=True)
    due = start + (time.monotonic() - start) / _SHARE

  return refresh


def markdown(title: str, byline: str, sections: Sequence[Section]) -> str:
  """The sections of a page in Markdown: tables, and links to plots/."""
  lines = [f"# {title}", "", f"{_plain_text(byline)}.", ""]
  for section in sections:
    lines += [f"## {_plain_text(section.title)}", ""]
    for part in section.parts:
      if isinstance(part, str):
        lines += [_plain_text(part), ""]
      elif isinstance(part, Picture):
        lines += [
          f"![{_plain_text(part.caption)}]({PLOTS}/{part.stem}.png)",
          "",
        ]
      elif isinstance(part, list):
        lines += [*(f"- {_plain_text(note)}" for note in part), ""]
      else:
        lines += [
          f"### {_plain_text(part[0])}",
          "",
          *_markdown_table(part[1]),
          "",
        ]
  return "\n".join(lines).rstrip() + "\n"


_MARKUP = re.compile(r"<(?=[A-Za-z/!?])|(?<=\])\(")


def _plain_text(text: str) -> str:
  """Returns a text on one line, escaped so that file names are not HTML or links."""
  return _MARKUP.sub(lambda match: f"\\{match[0]}", " ".join(text.splitlines()))


def _markdown_table(table: Table) -> list[str]:
  lines = []
  if table.shared:
    shared = "; ".join(f"{k} {text}" for k, text in table.shared.items())
    lines += [_plain_text(f"All rows: {shared}."), ""]
  texts = table.frame().map(lambda text: _plain_text(text).replace("|", "\\|"))
  texts.columns = list(map(_plain_text, table.header))
  alignment = ["left", *["right"] * (len(table.header) - 1)]
  lines += [
    texts.to_markdown(index=False, disable_numparse=True, colalign=alignment)
  ]
  return [*lines, "", table.legend] if table.legend else lines


def _parts(task: Task, styles: Styles) -> list[Any]:
  """The parts of a task's section: tables, pictures, notes."""

  def picture(kind: str, figure: Any, caption: str) -> Picture:
    return Picture(f"{kind}-{anchor(task.name)}", figure, caption)

  map_figure, map_note = maps.task_map(task)
  parts: list[Any] = [
    ("Quality", tables.quality(task.summary)),
    remarks.tests(task) or None,
    picture("seeds", figures.seeds(task, styles), "One dot per seed."),
    picture(
      "curves",
      figures.learning_curves(task, styles),
      "Learning curves, one line per seed.",
    ),
    ("Paired over sentences", tables.bleu(task)),
    ("Steps to solve", tables.steps(task)),
    picture(
      "survival",
      figures.survival(task, styles),
      "Share of seeds that have solved the task, by step (Kaplan-Meier).",
    ),
    ("Other lengths", tables.lengths(task)),
    ("Whole sequences at other lengths", tables.whole_sequences(task)),
    picture(
      "lengths",
      figures.lengths(task, styles),
      "Quality at lengths other than the trained one, one line per seed.",
    ),
    ("Cost", tables.cost(task.summary)),
    picture(
      "quality-cost",
      figures.quality_cost(task, styles),
      "Quality against cost, one dot per seed.",
    ),
    picture(
      "capacity",
      figures.capacity(task, styles),
      "Quality against the size of the cache of a sequence.",
    ),
    picture(
      "pairs",
      figures.pairs(task, styles),
      "Recall against the number of pairs, one dot per seed.",
    ),
    picture(
      "maps",
      map_figure,
      "Attention weights of every row in one held-out example.",
    ),
  ]
  # The second element of a part is its content, which is None for some tasks.
  parts = [part for part in parts if part is not None and part[1] is not None]
  notes = [*remarks.choice_warnings(task), *remarks.notes(task)]
  notes += [map_note] * bool(map_note)
  return [*parts, notes] if notes else parts


def _setup(workdir: Path, run_records: Sequence[Record]) -> list[str]:
  """Describes what all runs share, and how the reported grid point was chosen."""
  shared = records.shared_settings(workdir)
  parts = []
  if shared.get("match_parameters"):
    parts.append(
      "All models of a task have the parameter count of the model with dense "
      "attention, as nearly as the width of their feed-forward layers allows."
    )
  elif "match_parameters" in shared:
    parts.append(
      "Parameter counts are not matched: each model is as in its config."
    )
  if seconds := shared.get("budget_seconds"):
    parts.append(f"Every run trains for {seconds:g} s.")
  if operations := shared.get("budget_flops"):
    parts.append(
      f"Every run trains for {operations:.3g} floating-point operations."
    )
  grid = {k: v for k, v in shared.items() if k.startswith("grid.")}
  if grid:
    points = " × ".join(f"`{k[5:]}` ∈ {v}" for k, v in grid.items())
    choosers = "the reported seeds"
    if any(record.get("choosing") for record in run_records):
      choosers = "separate seeds"
    # In an older version, the first seed chose the points at the rungs.
    elif "halving.rungs" in shared and shared.get("halving.seeds") != "all":
      choosers = "the first seed, which is also reported,"
    split = next(
      (s for s in (frame.splits(r)[0] for r in run_records) if s), "first"
    )
    parts.append(
      f"Each row has the point of {points} with the best result of {choosers} on the "
      f"{split} split."
    )
  exclusions = ("tasks", "match_parameters", "budget_seconds", "budget_flops")
  exclusions += (ownership.DATA,)
  fields = [
    f"`{field} = {value}`"
    for field, value in shared.items()
    if field not in exclusions
    and not field.startswith(("grid.", "across.", "halving."))
  ]
  if fields:
    parts.append(f"Set for all runs: {', '.join(fields)}.")
  return [" ".join(parts)] if parts else []


def _machine(runs: pd.DataFrame) -> str:
  """The recorded machines and versions of the runs."""
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
  """Reference results of other sources: 'From elsewhere: nanoGPT loss 1.88.'"""
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
"""LaTeX escapes for captions; pandas escapes only cells."""

_SIGNS = str.maketrans({
  "<": r"\textless{}",
  ">": r"\textgreater{}",
  "|": r"\textbar{}",
  '"': "''",
})  # fmt: skip
"""Signs that pandas keeps and that LaTeX's default fonts print as others."""


def _latex(tasks: Mapping[str, Task]) -> str:
  """One table per task, with booktabs: name, result and a few more columns."""
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
  latex = "\n".join(texts).translate(_SIGNS)
  return latex.replace(tables.TIED, "$\\approx$")
