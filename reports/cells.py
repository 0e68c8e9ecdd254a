"""Tables of the page: numbers that sort, and what made each of them."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from comparison.records import Record
from reports import numbers, quality, summary, table
from reports.columns import Column
from reports.style import Style
from reports.summary import Summary

_NOTHING = '<td class="none">–</td>'
# Of all runs; the rest is in results.csv.
_FIXED = ("task", "attention", "seed", "status")
_SHOWN = ("exact_match", "accuracy", "token_accuracy", "loss", "best_quality")
_SHOWN += ("parameters", "step_seconds", "seconds")


def summaries(
  of_task: Sequence[Summary],
  leaves: Sequence[str],
  columns: Sequence[Column],
  styles: Mapping[str, Style],
) -> str:
  """A row a mechanism: means and intervals.

  Args:
    of_task: of all its mechanisms.
    leaves: of the grid, where its chosen point is shown.
    columns: what is shown of each.
    styles: label of a mechanism -> how it is drawn.
  """
  header = [_header("attention", "attention", "text")]
  with_slots = summary.has_slots(of_task)
  if with_slots:
    header.append(_header("slots", "slots", "text"))
  header.append(_header("seeds", "seeds"))
  header += [_header(leaf, leaf.rpartition(".")[2]) for leaf in leaves]
  header += [_header(c.name, c.title, unit=c.unit) for c in columns]
  width = len(leaves) + len(columns)
  rows = []
  for one in of_task:
    row = [_mechanism(one.attention, styles)]
    if with_slots:
      row.append(_text(one.slots) if one.slots else _NOTHING)
    row.append(_number(len(one.done), f"{len(one.done)}/{len(one.runs)}"))
    if one.obstacle:
      row.append(
        f'<td class="why" colspan="{width}">{html.escape(one.obstacle)}</td>'
      )
    else:
      row += [_value(one.grid.get(leaf)) for leaf in leaves]
      row += [_mean(one, column) for column in columns]
    row.append(_commands(one.runs))
    rows.append(row)
  return _table([*header, _header("command", "command", "")], rows)


def runs(found: Sequence[Record], styles: Mapping[str, Style]) -> str:
  """A row a run, as in results.csv, less what fits no page.

  Args:
    found: all records.
    styles: label of a mechanism -> how it is drawn.
  """
  content = table.rows(found)
  with_slots = any(row["slots"] for row in content)
  leaves = sorted({leaf for r in found for leaf in r.get("grid", {})})
  shown = [
    name
    for name in (*leaves, *_SHOWN)
    if any(row.get(name) is not None for row in content)
  ]
  header = [
    _header("attention", "attention", "text"),
    *([_header("slots", "slots", "text")] if with_slots else []),
    _header("task", "task", "text"),
    _header("seed", "seed"),
    _header("status", "status", "text"),
    *(_header(name, name) for name in shown),
    _header("command", "command", ""),
  ]
  rows = []
  for row in content:
    slots = _text(row["slots"]) if row["slots"] else _NOTHING
    status = row["status"]
    if row["reason"]:
      status += f": {row['reason']}"
    cells = [
      _mechanism(row["attention"], styles),
      *([slots] if with_slots else []),
      _text(row["task"]),
      _value(row["seed"]),
      _text(status, "reason" if row["reason"] else "text"),
      *(_value(row[name]) for name in shown),
      _details([row["command"]]),
    ]
    rows.append(cells)
  return _table(header, rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
  return (
    '<div class="scroll" tabindex="0">\n<table>\n'
    f"<thead><tr>{''.join(header)}</tr></thead>\n"
    f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
  )


def _header(name: str, title: str, kind: str = "number", unit: str = "") -> str:
  """A column's head; without a kind it does not sort."""
  sort = f' data-sort="{kind}"' if kind else ""
  text = ' class="text"' if kind != "number" else ""
  shown = html.escape(title)
  if unit:
    shown += f" <small>{html.escape(unit)}</small>"
  return (
    f'<th scope="col" data-name="{html.escape(name)}"{sort}{text}>{shown}</th>'
  )


def _mechanism(label: str, styles: Mapping[str, Style]) -> str:
  style = styles[label]
  name = html.escape(label)
  # U+FE0E asks for the character and not for a picture of it.
  return (
    f'<th scope="row" class="text" data-value="{name}"><span class="key" '
    f'style="color: var(--m{style.slot})" aria-hidden="true">{style.glyph}'
    f"\ufe0e</span>{name}</th>"
  )


def _mean(one: Summary, column: Column) -> str:
  mean = one.mean(column.name)
  if mean is None:
    return _NOTHING
  text, _, interval = summary.text(one, column).partition(" ")
  if interval:
    text += f' <span class="ci">{interval}</span>'
  return _number(mean, text)


def _value(found: Any) -> str:
  """A cell of any value; a number as it is in results.csv, and shorter."""
  if found is None:
    return _NOTHING
  if not quality.is_number(found):
    return _text(str(found))
  is_long = isinstance(found, float)
  return _number(found, numbers.compact(found) if is_long else f"{found:,}")


def _number(found: float, shown: str) -> str:
  return f'<td data-value="{found!r}">{shown}</td>'


def _text(shown: str, kind: str = "text") -> str:
  text = html.escape(shown)
  return f'<td class="{kind}" data-value="{text}">{text}</td>'


def _commands(found: Sequence[Record]) -> str:
  return _details([table.command(record) for record in found])


def _details(commands: Sequence[str]) -> str:
  code = "".join(f"<code>{html.escape(command)}</code>" for command in commands)
  return (
    f'<td class="text"><details><summary>show</summary>{code}</details></td>'
  )
