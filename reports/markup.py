"""Cells and tables of a page: numbers that sort."""

from collections.abc import Mapping, Sequence
import html
from typing import Any

from reports import numbers, quality
from reports.style import Style

NOTHING = '<td class="none">–</td>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  """A table that scrolls in itself, of cells."""
  body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
  return (
    '<div class="scroll" tabindex="0">\n<table>\n'
    f"<thead><tr>{''.join(header)}</tr></thead>\n"
    f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
  )


def head(name: str, title: str, kind: str = "number", unit: str = "") -> str:
  """A column's head; without a kind it does not sort."""
  sort = f' data-sort="{kind}"' if kind else ""
  text = ' class="text"' if kind != "number" else ""
  shown = html.escape(title)
  if unit:
    shown += f" <small>{html.escape(unit)}</small>"
  return (
    f'<th scope="col" data-name="{html.escape(name)}"{sort}{text}>{shown}</th>'
  )


def mechanism(label: str, styles: Mapping[str, Style]) -> str:
  """The head of a row: a mechanism with its mark."""
  style = styles[label]
  name = html.escape(label)
  # U+FE0E asks for the character and not for a picture of it.
  return (
    f'<th scope="row" class="text" data-value="{name}"><span class="key" '
    f'style="color: var(--m{style.slot})" aria-hidden="true">{style.glyph}'
    f"\ufe0e</span>{name}</th>"
  )


def value(found: Any) -> str:
  """A cell of any value; a number as it is in results.csv, and shorter."""
  if found is None:
    return NOTHING
  if not quality.is_number(found):
    return text(str(found))
  is_long = isinstance(found, float)
  return number(found, numbers.compact(found) if is_long else f"{found:,}")


def number(found: float, shown: str) -> str:
  """A cell that sorts by a number and shows a text."""
  return f'<td data-value="{found!r}">{shown}</td>'


def text(shown: str, kind: str = "text") -> str:
  """A cell of text; `kind` is its class."""
  escaped = html.escape(shown)
  return f'<td class="{kind}" data-value="{escaped}">{escaped}</td>'
