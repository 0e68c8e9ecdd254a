"""Tables of the page: numbers that sort, and what made each of them."""

from collections.abc import Mapping, Sequence
import html

from comparison.records import Record
from reports import markup, quality, sentences, summary, table, words
from reports.columns import Column
from reports.style import Style
from reports.summary import Summary

# Of all runs; the rest is in results.csv.
_FIXED = ("task", "attention", "seed", "status")
_SHOWN = (
  "exact_match",
  "accuracy",
  "error_rate",
  "token_accuracy",
  "loss",
  "best_quality",
)
_SHOWN += ("learning_rate", "parameters", "step_seconds", "seconds")


def summaries(
  of_task: Sequence[Summary],
  leaves: Sequence[str],
  columns: Sequence[Column],
  styles: Mapping[str, Style],
) -> str:
  """Means and intervals, a row a summary.

  Args:
    of_task: all of a task.
    leaves: of the grid, where its chosen point is shown.
    columns: what is shown of each.
    styles: label of a mechanism -> how it is drawn.
  """
  across = words.across_leaves(of_task)
  header = _names(of_task, across)
  texts = summary.texts(of_task)
  header += [markup.head(name, name, "text") for name in texts]
  header.append(markup.head("seeds", "seeds"))
  header += [markup.head(leaf, words.short(leaf)) for leaf in leaves]
  header += [markup.head(c.name, c.title, unit=c.unit) for c in columns]
  width = len(leaves) + len(columns)
  marked = summary.marks(of_task, columns)
  rows = []
  for one in of_task:
    row = [markup.mechanism(one.attention, styles)]
    row += [markup.value(one.across.get(leaf)) for leaf in across]
    row += [_told(one.told(name)) for name in texts]
    row.append(markup.number(len(one.done), f"{len(one.done)}/{len(one.runs)}"))
    if one.obstacle:
      row.append(
        f'<td class="why" colspan="{width}">{html.escape(one.obstacle)}</td>'
      )
    else:
      row += [markup.value(one.grid.get(leaf)) for leaf in leaves]
      row += [_mean(one, column, marked) for column in columns]
    row.append(_commands(one.runs))
    rows.append(row)
  return markup.table([*header, markup.head("command", "command", "")], rows)


def pairs(found: sentences.Pairs, styles: Mapping[str, Style]) -> str:
  """Rows against the best one, paired over sentences.

  Args:
    found: the comparison.
    styles: label of a mechanism -> how it is drawn.
  """
  shown = [one.row for one in found.pairs]
  across = words.across_leaves(shown)
  header = _names(shown, across)
  names = ("paired_seeds", "paired_bleu", "paired_interval", "paired_p")
  header += map(markup.head, names, sentences.HEADS)
  rows = []
  for row, seeds, difference in found.pairs:
    cells = [markup.mechanism(row.attention, styles)]
    cells += [markup.value(row.across.get(leaf)) for leaf in across]
    cells.append(markup.number(seeds, str(seeds)))
    if difference is None:
      cells += [markup.NOTHING] * 3
    else:
      by = (difference.mean, difference.low, difference.p_value)
      cells += map(markup.number, by, sentences.shown(difference))
    rows.append(cells)
  return markup.table(header, rows)


def runs(found: Sequence[Record], styles: Mapping[str, Style]) -> str:
  """A row a run, as in results.csv, less what fits no page.

  Args:
    found: all records.
    styles: label of a mechanism -> how it is drawn.
  """
  content = table.rows(found)
  texts = [n for n in summary.TEXTS if any(row[n] for row in content)]
  leaves = [
    leaf
    for field in ("across", "grid")
    for leaf in sorted({leaf for r in found for leaf in r.get(field, {})})
  ]
  varied = set(map(words.short, leaves))
  shown = [
    name
    for name in (*leaves, *(n for n in _SHOWN if n not in varied))
    if any(row.get(name) is not None for row in content)
  ]
  header = [
    markup.head("attention", "attention", "text"),
    *(markup.head(name, name, "text") for name in texts),
    markup.head("task", "task", "text"),
    markup.head("seed", "seed"),
    markup.head("status", "status", "text"),
    *(markup.head(name, name) for name in shown),
    markup.head("command", "command", ""),
  ]
  rows = []
  for row in content:
    status = row["status"]
    if row["reason"]:
      status += f": {row['reason']}"
    cells = [
      markup.mechanism(row["attention"], styles),
      *(_told(row[name]) for name in texts),
      markup.text(row["task"]),
      markup.value(row["seed"]),
      markup.text(status, "reason" if row["reason"] else "text"),
      *(markup.value(row[name]) for name in shown),
      _details([row["command"]]),
    ]
    rows.append(cells)
  return markup.table(header, rows)


def _names(of_task: Sequence[Summary], across: Sequence[str]) -> list[str]:
  """Heads of the columns that name a row: mechanism and leaves of `across`."""
  header = [markup.head("attention", "attention", "text")]
  for leaf in across:
    values = [one.across.get(leaf) for one in of_task]
    kind = "number" if all(map(quality.is_number, values)) else "text"
    header.append(markup.head(leaf, words.short(leaf), kind))
  return header


def _told(found: str | None) -> str:
  return markup.text(found) if found else markup.NOTHING


def _mean(one: Summary, column: Column, marked: summary.Marks) -> str:
  mean = one.mean(column.name)
  if mean is None:
    return markup.NOTHING
  text, _, interval = summary.text(one, column, marked).partition(" ")
  if interval:
    text += f' <span class="ci">{interval}</span>'
  return markup.number(mean, text)


def _commands(found: Sequence[Record]) -> str:
  return _details([table.command(record) for record in found])


def _details(commands: Sequence[str]) -> str:
  code = "".join(f"<code>{html.escape(command)}</code>" for command in commands)
  return (
    f'<td class="text"><details><summary>show</summary>{code}</details></td>'
  )
