"""Everything a comparison has found, as files for a reader and for programs."""

from collections.abc import Callable, Mapping, Sequence
import json
from pathlib import Path
import time
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
from settings.errors import one_line
from training import claimed

PAGE, TEXT, TABLES = "report.html", "report.md", "report.tex"
PLOTS = "plots"

_SHARE = 0.02
"""Of the time of a comparison, for reports while it runs."""


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
  html = page.page(found, shared, by_task, of_scaling, styles)
  # Whoever has the page open may read it again at any time.
  claimed.replace_text(workdir / TEXT, text)
  claimed.replace_text(workdir / TABLES, latex.report(found))
  claimed.replace_text(workdir / PAGE, html)
  return text


def meanwhile(workdir: Path) -> Callable[[], None]:
  """What a comparison calls after each run, to keep its report up to date.

  After a report it writes none until 50 times as long has passed as that one took.
  A fault is printed, and stops nothing.

  Args:
    workdir: of the comparison.
  """
  due = time.monotonic()

  def after() -> None:
    nonlocal due
    start = time.monotonic()
    if start < due:
      return
    try:
      found, _ = records.read(workdir)
      write(workdir, found, records.scaling(workdir))
    except Exception as error:  # No run is lost for a page.
      print(f"  no report: {one_line(error)}; the runs go on", flush=True)
    due = start + (time.monotonic() - start) / _SHARE

  return after


def _shared(workdir: Path) -> dict[str, Any]:
  path = workdir / records.COMPARISON
  return json.loads(path.read_text()) if path.exists() else {}
