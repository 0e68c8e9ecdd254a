"""Writes the results of a swap as tables, figures and a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import pandas as pd

from comparison.analysis.summary import Cost
from comparison.report import files, page, style
from comparison.report.page import Section
from comparison.report.tables import NOTHING, Cell, Table
from projects.swap import figures, rows
from projects.swap.records import CANNOT, Record
from projects.swap.settings import Settings

PAGE = files.PAGE
_TITLE = "Another attention in a trained model"
_READING = (
  "`own` is the original model. Every other row is the same model with another "
  "mechanism in its self-attention modules: first with the original weights and the "
  "initial parameters of the mechanism, then with the mechanism trained to reproduce "
  "the outputs of the attention that it replaces (transferred), then with all weights "
  "trained with the usual loss (fine-tuned). All losses use the same held-out "
  "windows. All numbers are in results.csv and layers.csv, and all swapped models in "
  "models/."
)


def write(workdir: Path, settings: Settings, records: Sequence[Record]) -> str:
  """Writes results.csv, layers.csv, plots/, report.md and report.html.

  Args:
    workdir: folder of the swap.
    settings: the options that all records share.
    records: all records.

  Returns:
    The text of report.md.
  """
  content = rows.results(records)
  pd.DataFrame(content).to_csv(workdir / "results.csv", index=False)
  layers = pd.DataFrame(rows.layers(records))
  layers.to_csv(workdir / "layers.csv", index=False)
  with style.look():
    pictures = figures.pictures(records)
  page.save(workdir / files.PLOTS, pictures)
  device = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
  machine = f"{device}; jax {jax.__version__}"
  measured = [r for r in content if r["status"] != CANNOT and not r["keep"]]
  sections = [
    Section("How to read this", [f"{_subject(settings)}.", _READING]),
    Section(
      "Tables",
      [
        ("Quality", _with_options(_table(content, rows.QUALITY), content)),
        ("Cost", _table(measured, rows.COSTS)),
        _meanings(content),
      ],
    ),
    Section("Plots", pictures),
  ]
  text = files.markdown(_TITLE, machine, sections)
  (workdir / files.TEXT).write_text(text, "utf-8")
  html = page.render(_TITLE, machine, sections, workdir / files.PLOTS)
  (workdir / PAGE).write_text(html, "utf-8")
  return text


def _subject(settings: Settings) -> str:
  """Describes the model, the text and the training in one sentence."""
  parts = [f"`{settings.weights}` on `{settings.text}`"]
  for steps, phase in (
    (settings.transfer_steps, "steps of transfer"),
    (settings.finetune_steps, "steps of fine-tuning"),
  ):
    if steps:
      parts.append(f"{steps:,} {phase}")
  parts.append(f"batches of {settings.batch_size} windows")
  if settings.length is not None:
    parts.append(f"--length {settings.length:,}")
  return ", ".join(parts)


def _columns_with_values(
  content: Sequence[Mapping[str, Any]], columns: Mapping[str, Cost]
) -> dict[str, Cost]:
  """Returns the columns that have a value in at least one row."""
  return {
    name: column
    for name, column in columns.items()
    if any(row[name] is not None for row in content)
  }


def _table(
  content: Sequence[Mapping[str, Any]], columns: Mapping[str, Cost]
) -> Table:
  columns = _columns_with_values(content, columns)
  body = []
  for row in content:
    cells = [Cell(row["attention"], row["attention"])]
    if row["status"] == CANNOT:
      cells += [Cell(row["reason"] or ""), *[Cell("")] * (len(columns) - 1)]
    else:
      cells += [
        rows.cell(row[name], column) for name, column in columns.items()
      ]
      if row["kept"] and "keep" in columns:
        keep = cells[1 + list(columns).index("keep")]
        cells[1 + list(columns).index("keep")] = Cell(
          f"{keep.text} ({row['kept']})", keep.order
        )
    body.append(cells)
  return Table(["mechanism", *(_title(c) for c in columns.values())], body)


def _with_options(table: Table, content: Sequence[Mapping[str, Any]]) -> Table:
  """Adds a last column with all options of each mechanism."""
  options = [Cell(x, x) for x in (row["options"] or NOTHING for row in content)]
  body = [[*row, x] for row, x in zip(table.rows, options, strict=True)]
  return table._replace(header=[*table.header, "options"], rows=body)


def _meanings(content: Sequence[Mapping[str, Any]]) -> list[str]:
  columns = _columns_with_values(content, {**rows.QUALITY, **rows.COSTS})
  return [f"{_title(c)}: {c.meaning}" for c in columns.values()]


def _title(column: Cost) -> str:
  return f"{column.title}, {column.unit}" if column.unit else column.title
