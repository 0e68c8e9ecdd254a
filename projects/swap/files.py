"""Everything that a swap has found, as files for a reader and for programs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from projects.swap import figures as swap_figures
from projects.swap import page, rows
from projects.swap.records import CANNOT, Record
from projects.swap.settings import Settings
from reports import figures, markdown, style, table, words
from reports.files import PAGE, PLOTS, TEXT

__all__ = ["PAGE", "write"]


def write(workdir: Path, settings: Settings, found: Sequence[Record]) -> str:
  """Writes results.csv, layers.csv, plots/, report.md and report.html.

  Args:
    workdir: of the swap.
    settings: that all records share.
    found: all records.

  Returns:
    The text of report.md.
  """
  table.write_csv(workdir / "results.csv", rows.results(found))
  table.write_csv(workdir / "layers.csv", rows.layers(found))
  styles = style.styles(record["attention"] for record in found)
  drawn = swap_figures.figures(found, styles)
  figures.save(workdir / PLOTS, drawn)
  device = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
  machine = f"{device}; jax {jax.__version__}"
  subject = _subject(settings)
  text = _text(found, subject, machine, drawn)
  (workdir / TEXT).write_text(text, "utf-8")
  (workdir / PAGE).write_text(
    page.html_page(found, subject, machine, drawn, styles), "utf-8"
  )
  return text


def _subject(settings: Settings) -> str:
  """What was done to which model, in one sentence."""
  parts = [f"`{settings.weights}` on `{settings.text}`"]
  for steps, what in (
    (settings.transfer_steps, "steps of transfer"),
    (settings.finetune_steps, "steps of fine-tuning"),
  ):
    if steps:
      parts.append(f"{steps:,} {what}")
  parts.append(f"batches of {settings.batch_size} windows")
  if settings.length is not None:
    parts.append(f"--length {settings.length:,}")
  return ", ".join(parts)


def _text(
  found: Sequence[Record],
  subject: str,
  machine: str,
  drawn: Sequence[figures.Figure],
) -> str:
  quality, costs = page.tables(found)
  content = rows.results(found)
  lines = [f"# {page.TITLE}", "", f"{machine}.", "", f"{subject}.", ""]
  lines += [page.READING, ""]
  of_cost = [row for row in content if row["keep"] == 0]
  for title, columns, shown in (
    ("Quality", quality, content),
    ("Cost", costs, of_cost),
  ):
    if columns and shown:
      lines += [f"## {title}", "", *_table(columns, shown), ""]
  lines += ["## Columns", ""]
  lines += [f"- {words.titled(c)}: {c.meaning}" for c in (*quality, *costs)]
  lines += ["", "## Plots", ""]
  lines += [f"![{one.caption}]({PLOTS}/{one.stem}.svg)\n" for one in drawn]
  return "\n".join(lines).rstrip() + "\n"


def _table(
  columns: Sequence[Any], content: Sequence[Mapping[str, Any]]
) -> list[str]:
  header = ["attention", *map(words.titled, columns)]
  body = []
  for row in content:
    cells = [f"`{row['attention']}`"]
    if row["status"] == CANNOT:
      cells.append((row["reason"] or "").replace("|", "\\|"))
    else:
      cells += [rows.shown(row[c.name], c) for c in columns]
    body.append(cells)
  return markdown.aligned(header, body, 1)
