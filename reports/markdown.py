"""The report as text: for a terminal, a pull request, a paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from comparison.records import Record
from reports import lengths, sentences, summary, table, words
from reports import rows as table_rows
from reports.columns import Column


def report(
  found: Sequence[Record],
  shared: Mapping[str, Any],
  plots: Mapping[str, str],
) -> str:
  """Two tables a task, what it takes to read them, and every command.

  Args:
    found: all records.
    shared: what all runs share, leaf -> value.
    plots: stem of a file in plots/ -> its caption.
  """
  lines = [f"# {words.TITLE}", ""]
  if machine := words.machine(found):
    lines += [f"{machine}.", ""]
  lines += [" ".join(words.setup(shared, found)), "", words.INTERVALS, ""]
  everything: list[Column] = []
  by_task = summary.summarize(found)
  for task, summaries in by_task.items():
    quality = summary.quality_columns(summaries)
    costs = summary.cost_columns(summaries)
    everything += [*quality, *costs]
    leaves = words.grid_leaves(summaries)
    lines += [f"## {task}", "", "Quality", ""]
    lines += _table(table_rows.make(summaries, leaves, quality))
    if pairs := sentences.pairs(summaries):
      lines += ["", sentences.title(pairs), "", *_table(sentences.table(pairs))]
      lines += ["", sentences.legend(pairs)]
    if by_length := lengths.table(summaries):
      name = lengths.metric(summaries)
      lines += ["", f"{name} at each length, mean over seeds", ""]
      lines += _table(by_length)
    if costs:
      made = table_rows.make(summaries, (), costs)
      lines += ["", "Cost", "", *_table(made)]
    if notes := words.notes(summaries, [*quality, *costs], shared):
      lines += ["", *(f"- {_one_line(note)}" for note in notes)]
    lines += ["", "Commands, with the first seed:", ""]
    lines += [f"    {table.command(one.runs[0])}" for one in summaries]
    lines.append("")
  lines += ["## Columns", ""]
  texts = summary.texts(one for s in by_task.values() for one in s)
  for title, meaning in words.meanings(everything, texts).items():
    lines.append(f"- {title}: {meaning}")
  if plots:
    lines += ["", "## Plots", ""]
    for stem, caption in plots.items():
      lines.append(f"![{caption}](plots/{stem}.svg)\n")
  return "\n".join(lines).rstrip() + "\n"


def _table(made: table_rows.Table) -> list[str]:
  header, rows, left = made
  escaped = [
    [f"`{name}`", *(cell.replace("|", "\\|") for cell in cells)]
    for name, *cells in rows
  ]
  return aligned(header, escaped, left)


def aligned(
  header: Sequence[str], rows: Sequence[Sequence[str]], left: int
) -> list[str]:
  """Lines of a table, aligned for the eye as well.

  Args:
    header: of every column.
    rows: cells; a row that ends early has a reason in its last cell.
    left: how many columns are flush left.
  """
  whole = [header, *(row for row in rows if len(row) == len(header))]
  widths = [max(len(row[i]) for row in whole) for i in range(len(header))]
  rule = ["-" * width for width in widths[:left]]
  rule += ["-" * (width - 1) + ":" for width in widths[left:]]
  return [_line(row, widths, left) for row in (header, rule, *rows)]


def _line(cells: Sequence[str], widths: Sequence[int], left: int) -> str:
  """Cells side by side, the first `left` of them flush left."""
  padded = [
    cell.ljust(width) if i < left else cell.rjust(width)
    for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
  ]
  return f"| {' | '.join(padded)} |"


def _one_line(text: str) -> str:
  return " ".join(text.split())
