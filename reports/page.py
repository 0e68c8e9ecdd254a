"""The report as one page that needs no other file and no network."""

from collections.abc import Mapping, Sequence
import datetime
import html
from pathlib import Path
import re
from string import Template
from typing import Any, NamedTuple

from comparison.records import Record
from reports import cells, figures, sentences, style, summary, words
from reports.figures import Figure

_FOLDER = Path(__file__).parent
_LIMIT = 1_900_000  # Bytes: what a phone still opens at once.


class Part(NamedTuple):
  """A piece of the page, and what is shown instead where the page is too large."""

  markup: str
  instead: str


def page(
  found: Sequence[Record],
  shared: Mapping[str, Any],
  by_task: Mapping[str, Sequence[Figure]],
  scaling: Sequence[Figure],
  styles: Mapping[str, style.Style],
) -> str:
  """HTML with its style, script and pictures in it, below 2 MB.

  Args:
    found: all records.
    shared: what all runs share, leaf -> value.
    by_task: task -> its figures.
    scaling: figures of time and memory against length.
    styles: label of a mechanism -> how it is drawn.
  """
  summaries = summary.summarize(found)
  anchors = {"reading": "How to read this"}
  parts = [kept(_reading(found, shared, summaries))]
  for task, of_task in summaries.items():
    anchor = f"task-{words.stem(task)}"
    anchors[anchor] = task
    parts.append(kept(f'<section id="{anchor}">\n<h2>{html.escape(task)}</h2>'))
    parts.append(kept(_tables(of_task, shared, styles)))
    parts += [*map(figure_part, by_task[task]), kept("</section>")]
  if scaling:
    anchors["scaling"] = "Scaling"
    parts.append(kept('<section id="scaling">\n<h2>Scaling</h2>'))
    parts += [*map(figure_part, scaling), kept("</section>")]
  anchors["runs"] = "All runs"
  parts.append(kept('<section id="runs">\n<h2>All runs</h2>'))
  too_many = "<p>There are too many for this page; see results.csv.</p>"
  parts.append(Part(cells.runs(found, styles), too_many))
  parts.append(kept("</section>"))
  return document(
    words.TITLE, ", ".join(summaries), words.machine(found), anchors, parts
  )


def document(
  title: str,
  subject: str,
  machine: str,
  anchors: Mapping[str, str],
  parts: Sequence[Part],
) -> str:
  """A whole page, below 2 MB.

  Args:
    title: its heading.
    subject: what the title of the window says in addition.
    machine: what it was measured on.
    anchors: id of a section -> its name in the contents.
    parts: the page from top to bottom.
  """
  byline = [datetime.date.today().isoformat(), machine]
  return Template((_FOLDER / "page.html").read_text("utf-8")).substitute(
    title=html.escape(title),
    subject=html.escape(subject),
    byline=html.escape("; ".join(filter(None, byline))),
    css=_palette() + (_FOLDER / "page.css").read_text("utf-8"),
    js=(_FOLDER / "page.js").read_text("utf-8"),
    nav="\n".join(
      f'<a href="#{anchor}">{html.escape(name)}</a>'
      for anchor, name in anchors.items()
    ),
    main="\n".join(fitted(parts, _LIMIT)),
  )


def fitted(parts: Sequence[Part], limit: int) -> list[str]:
  """Markup of the parts; the largest give way until `limit` bytes hold all."""
  chosen = [part.markup for part in parts]
  sizes = [len(markup.encode()) for markup in chosen]
  for index in sorted(range(len(parts)), key=lambda i: -sizes[i]):
    if sum(sizes) <= limit:
      break
    chosen[index] = parts[index].instead
    sizes[index] = len(chosen[index].encode())
  return chosen


def kept(markup: str) -> Part:
  """A part that stays, however large the page."""
  return Part(markup, markup)


def _tables(
  of_task: Sequence[summary.Summary],
  shared: Mapping[str, Any],
  styles: Mapping[str, style.Style],
) -> str:
  quality = summary.quality_columns(of_task)
  costs = summary.cost_columns(of_task)
  leaves = words.grid_leaves(of_task)
  lines = [
    "<h3>Quality</h3>",
    cells.summaries(of_task, leaves, quality, styles),
  ]
  if pairs := sentences.pairs(of_task):
    lines += [
      f"<h3>{html.escape(sentences.title(pairs))}</h3>",
      cells.pairs(pairs, styles),
      f"<p>{prose(sentences.legend(pairs))}</p>",
    ]
  if costs:
    lines += ["<h3>Cost</h3>", cells.summaries(of_task, (), costs, styles)]
  if notes := words.notes(of_task, [*quality, *costs], shared):
    items = "\n".join(f"<li>{prose(note)}</li>" for note in notes)
    lines.append(f'<ul class="notes">\n{items}\n</ul>')
  return "\n".join(lines)


def _reading(
  found: Sequence[Record],
  shared: Mapping[str, Any],
  summaries: Mapping[str, Sequence[summary.Summary]],
) -> str:
  columns = [
    column
    for of_task in summaries.values()
    for column in (
      *summary.quality_columns(of_task),
      *summary.cost_columns(of_task),
    )
  ]
  texts = summary.texts(one for s in summaries.values() for one in s)
  terms = "\n".join(
    f"<dt>{html.escape(title)}</dt><dd>{html.escape(meaning)}</dd>"
    for title, meaning in words.meanings(columns, texts).items()
  )
  sentences = [*words.setup(shared, found), words.INTERVALS]
  return (
    '<section id="reading">\n<h2>How to read this</h2>\n'
    f"<p>{prose(' '.join(sentences))}</p>\n"
    "<p>A click on a header sorts a table. <em>Mechanisms</em> above hides "
    "them in tables and pictures, <em>Columns</em> hides those of the tables, "
    "and the address keeps the view. <em>Command</em> shows what makes "
    "a run again; one click on it selects it. Every number of every run is "
    "in results.csv, every figure in plots/, in the folder of this file.</p>\n"
    f"<details><summary>What the columns mean</summary>\n<dl>{terms}</dl>"
    "</details>\n</section>"
  )


def figure_part(figure: Figure) -> Part:
  """The panels of a figure, or where its file is."""
  panels = "\n".join(
    f"<div{_shows(figure.mechanisms.get(name))}>{panel}</div>"
    for name, panel in figures.inline(figure).items()
  )
  small = " small" if figure.stem.startswith("maps") else ""
  caption = f"<figcaption>{html.escape(figure.caption)}</figcaption>"
  return Part(
    f'<figure>\n<div class="panels{small}">\n{panels}\n</div>\n{caption}\n'
    "</figure>",
    f"<figure>\n<p>plots/{html.escape(figure.stem)}.svg is too large for this "
    f"page.</p>\n{caption}\n</figure>",
  )


def _shows(mechanism: str | None) -> str:
  """The attribute of a panel that shows one mechanism alone."""
  if mechanism is None:
    return ""
  return f' data-mechanism="{html.escape(mechanism)}"'


def prose(text: str) -> str:
  """Escaped, with what is in backticks as code."""
  return re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _palette() -> str:
  """The colours of the mechanisms as variables, for both backgrounds."""
  colors = "".join(
    f"  --m{slot}: light-dark({light}, {dark});\n"
    for slot, (light, dark) in enumerate(style.PALETTE)
  )
  return f":root {{\n{colors}}}\n"
