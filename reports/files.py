"""Everything a comparison has found, as files for a reader and for programs."""

from collections.abc import Mapping, Sequence
import json
from pathlib import Path
from typing import Any

from comparison import records
from comparison.records import Record
from reports import (
  comparison_maps,
  figures,
  latex,
  markdown,
  page,
  plots,
  style,
  summary,
  table,
)
from reports import scaling as scaling_lib

PAGE, TEXT, TABLES = "report.html", "report.md", "report.tex"
PLOTS = "plots"


def write(
  workdir: Path,
  found: Sequence[Record],
  scaling: Sequence[Mapping[str, Any]] | None,
) -> str:
  """Writes results.jsonl, results.csv, plots/ and the reports.

  Args:
    workdir: of the comparison.
    found: its records, also those that failed or cannot be.
    scaling: time and memory against length, a mapping a measurement; None
      where it was not measured.

  Returns:
    The text of report.md.
  """
  table.write(workdir, found)
  summaries = summary.summarize(found)
  labels = [record["attention"] for record in found]
  styles = style.styles([*labels, *(row["mechanism"] for row in scaling or ())])
  references = records.references(workdir)
  by_task = {
    task: [
      *plots.of_task(task, of_task, styles, references.get(task, {})),
      *comparison_maps.of_task(task, of_task),
    ]
    for task, of_task in summaries.items()
  }
  of_scaling = scaling_lib.figures(scaling or (), styles)
  drawn = [figure for of_task in by_task.values() for figure in of_task]
  drawn += of_scaling
  figures.save(workdir / PLOTS, drawn)
  shared = _shared(workdir)
  captions = {figure.stem: figure.caption for figure in drawn}
  text = markdown.report(found, shared, captions)
  (workdir / TEXT).write_text(text, "utf-8")
  (workdir / TABLES).write_text(latex.report(found), "utf-8")
  (workdir / PAGE).write_text(
    page.page(found, shared, by_task, of_scaling, styles), "utf-8"
  )
  return text


def _shared(workdir: Path) -> dict[str, Any]:
  path = workdir / records.COMPARISON
  return json.loads(path.read_text()) if path.exists() else {}
