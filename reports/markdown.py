"""The report as text: for a terminal, a pull request, a paper."""

from collections.abc import Mapping, Sequence
from typing import Any

from comparison.records import Record
from reports import summary, table, words
from reports.columns import Column
from reports.summary import Summary


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
  for task, summaries in summary.summarize(found).items():
    quality = summary.quality_columns(summaries)
    costs = summary.cost_columns(summaries)
    everything += [*quality, *costs]
    leaves = words.grid_leaves(summaries)
    lines += [f"## {task}", "", "Quality", ""]
    lines += _table(summaries, leaves, quality)
    if costs:
      lines += ["", "Cost", "", *_table(summaries, (), costs)]
    if notes := words.notes(summaries, [*quality, *costs]):
      lines += ["", *(f"- {_one_line(note)}" for note in notes)]
    lines += ["", "Commands, with the first seed:", ""]
    lines += [f"    {table.command(one.runs[0])}" for one in summaries]
    lines.append("")
  lines += ["## Columns", ""]
  for title, meaning in words.meanings(everything).items():
    lines.append(f"- {title}: {meaning}")
  if plots:
    lines += ["", "## Plots", ""]
    for stem, caption in plots.items():
      lines.append(f"![{caption}](plots/{stem}.svg)\n")
  return "\n".join(lines).rstrip() + "\n"


def _table(
  summaries: Sequence[Summary],
  leaves: Sequence[str],
  columns: Sequence[Column],
) -> list[str]:
  """Aligned for the eye as well; a row that has nothing but a reason is not."""
  header = ["attention", "seeds", *(leaf.rpartition(".")[2] for leaf in leaves)]
  header += [words.titled(column) for column in columns]
  rows = [_cells(one, leaves, columns) for one in summaries]
  whole = [header, *(row for row in rows if len(row) == len(header))]
  widths = [max(len(row[i]) for row in whole) for i in range(len(header))]
  rule = ["-" * widths[0], *("-" * (w - 1) + ":" for w in widths[1:])]
  return [_line(row, widths) for row in (header, rule, *rows)]


def _cells(
  one: Summary, leaves: Sequence[str], columns: Sequence[Column]
) -> list[str]:
  cells = [f"`{one.attention}`", f"{len(one.done)}/{len(one.runs)}"]
  if one.obstacle:
    return [*cells, _one_line(one.obstacle).replace("|", "\\|")]
  cells += [str(one.grid.get(leaf, "–")) for leaf in leaves]
  return [*cells, *(summary.text(one, column) for column in columns)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
  padded = [
    cell.rjust(width) if i else cell.ljust(width)
    for i, (cell, width) in enumerate(zip(cells, widths, strict=False))
  ]
  return f"| {' | '.join(padded)} |"


def _one_line(text: str) -> str:
  return " ".join(text.split())
