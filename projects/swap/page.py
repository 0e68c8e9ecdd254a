"""The page of a swap, with the look of a comparison's."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from projects.swap import rows
from projects.swap.records import CANNOT, Record
from reports import markup, page
from reports.columns import Column
from reports.figures import Figure
from reports.style import Style

TITLE = "Another attention in a model that works"
READING = (
  "`own` is the model as it is. Every other row is the same model with another "
  "mechanism in its self-attentions: first with the weights as they are and what "
  "the mechanism draws of its own, then with the mechanism fitted to the output "
  "of what it replaces (transferred), then with all weights trained by the usual "
  "loss (fine-tuned). Losses are of the same held-out windows."
)


def html_page(
  found: Sequence[Record],
  subject: str,
  machine: str,
  figures: Sequence[Figure],
  styles: Mapping[str, Style],
) -> str:
  """HTML with its style, script and pictures in it, below 2 MB.

  Args:
    found: all records.
    subject: what was swapped, in one line.
    machine: what it was measured on.
    figures: of `projects.swap.figures`.
    styles: label -> how it is drawn.
  """
  quality, costs = tables(found)
  terms = "\n".join(
    f"<dt>{html.escape(column.title)}</dt><dd>{html.escape(column.meaning)}</dd>"
    for column in (*quality, *costs)
  )
  reading = (
    '<section id="reading">\n<h2>How to read this</h2>\n'
    f"<p>{page.prose(subject)}.</p>\n<p>{page.prose(READING)}</p>\n"
    "<p>A click on a header sorts a table. Every number is in results.csv and "
    "layers.csv, every figure in plots/, every swapped model in models/.</p>\n"
    f"<details><summary>What the columns mean</summary>\n<dl>{terms}</dl>"
    "</details>\n</section>"
  )
  content = rows.results(found)
  of_cost = [row for row in content if row["keep"] in (0, None)] or content
  body = [
    page.kept(reading),
    page.kept('<section id="quality">\n<h2>Quality</h2>'),
    page.kept(_table(content, quality, styles)),
    page.kept("</section>"),
  ]
  anchors = {"reading": "How to read this", "quality": "Quality"}
  if costs:
    able = [row for row in of_cost if row["status"] != CANNOT]
    anchors["cost"] = "Cost"
    body += [
      page.kept('<section id="cost">\n<h2>Cost</h2>'),
      page.kept(_table(able, costs, styles)),
      page.kept("</section>"),
    ]
  titles = {
    "quality-cost": "Quality against cost",
    "layers": "Layer by layer",
    "maps": "What the last layer attends to",
  }
  for figure in figures:
    anchors[figure.stem] = titles[figure.stem]
    opening = f'<section id="{figure.stem}">\n<h2>{titles[figure.stem]}</h2>'
    body += [page.kept(opening), page.figure_part(figure)]
    body.append(page.kept("</section>"))
  return page.document(TITLE, subject, machine, anchors, body)


def tables(found: Sequence[Record]) -> tuple[list[Column], list[Column]]:
  """The columns of quality and of cost that some row has."""
  content = rows.results(found)

  def used(columns: Sequence[Column]) -> list[Column]:
    return [
      c for c in columns if any(row[c.name] is not None for row in content)
    ]

  return used(rows.QUALITY), used(rows.COSTS)


def _table(
  content: Sequence[Mapping[str, Any]],
  columns: Sequence[Column],
  styles: Mapping[str, Style],
) -> str:
  header = [markup.head("attention", "attention", "text")]
  header += [markup.head(c.name, c.title, unit=c.unit) for c in columns]
  body = []
  for row in content:
    cells = [markup.mechanism(row["attention"], styles)]
    if row["status"] == CANNOT:
      reason = html.escape(row["reason"] or "")
      cells.append(f'<td class="why" colspan="{len(columns)}">{reason}</td>')
    else:
      cells += [_cell(row, column) for column in columns]
    body.append(cells)
  return markup.table(header, body)


def _cell(row: Mapping[str, Any], column: Column) -> str:
  value = row[column.name]
  if value is None:
    return markup.NOTHING
  text = rows.shown(value, column)
  if column.name == "keep" and row["kept"]:
    text += f' <span class="ci">({html.escape(row["kept"])})</span>'
  return markup.number(value, text)
