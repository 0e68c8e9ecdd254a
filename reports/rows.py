"""A table of summaries as text, for any format."""

from collections.abc import Sequence
from typing import NamedTuple

from reports import summary, words
from reports.columns import Column
from reports.summary import Summary


class Table(NamedTuple):
  """Cells of plain text.

  Attributes:
    header: of every column.
    rows: cells; a row that ends early has a reason in its last cell.
    left: how many columns are flush left.
  """

  header: list[str]
  rows: list[list[str]]
  left: int


def make(
  summaries: Sequence[Summary],
  leaves: Sequence[str],
  columns: Sequence[Column],
) -> Table:
  """Means and intervals.

  Args:
    summaries: of a task.
    leaves: of the grid, where its chosen point is shown.
    columns: what is shown of each.
  """
  texts = summary.texts(summaries)
  across = words.across_leaves(summaries)
  header = [
    "attention",
    *map(words.short, across),
    *texts,
    "seeds",
    *map(words.short, leaves),
  ]
  header += [words.titled(column) for column in columns]
  marked = summary.marks(summaries, columns)
  rows = []
  for one in summaries:
    row = [one.attention, *(str(one.across.get(leaf, "–")) for leaf in across)]
    row += [one.told(name) or "–" for name in texts]
    row.append(f"{len(one.done)}/{len(one.runs)}")
    if one.obstacle:
      rows.append([*row, " ".join(one.obstacle.split())])
      continue
    row += [str(one.grid.get(leaf, "–")) for leaf in leaves]
    rows.append([*row, *(summary.text(one, c, marked) for c in columns)])
  return Table(header, rows, 1 + len(across) + len(texts))
