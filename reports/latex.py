"""The tables for a paper: LaTeX with booktabs."""

from collections.abc import Sequence

from comparison.records import Record
from reports import rows, summary, words
from reports.columns import Column
from reports.summary import Summary

_ESCAPED = {
  "\\": r"\textbackslash{}",
  **{character: f"\\{character}" for character in "&%$#_{}"},
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
  "±": r"$\pm$",
  "≈": r"$\approx$",
  "–": "--",
  "·": r"$\cdot$",
  "×": r"$\times$",
}
"""Characters that pdfLaTeX does not print as they are."""


def report(found: Sequence[Record]) -> str:
  """Two tables a task, quality and cost.

  Args:
    found: all records.
  """
  lines = [r"% \usepackage{booktabs}"]
  for task, summaries in summary.summarize(found).items():
    leaves = words.grid_leaves(summaries)
    quality = summary.quality_columns(summaries)
    lines += ["", f"% {task}: quality", *_table(summaries, leaves, quality)]
    if costs := summary.cost_columns(summaries):
      lines += ["", f"% {task}: cost", *_table(summaries, (), costs)]
  return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
  """What LaTeX prints as `text`."""
  return "".join(_ESCAPED.get(character, character) for character in text)


def _table(
  summaries: Sequence[Summary],
  leaves: Sequence[str],
  columns: Sequence[Column],
) -> list[str]:
  header, body, left = rows.make(summaries, leaves, columns)
  width = len(header)
  lines = [
    rf"\begin{{tabular}}{{{'l' * left}{'r' * (width - left)}}}",
    r"  \toprule",
    _line(header),
    r"  \midrule",
  ]
  for name, *cells in body:
    shown = [rf"\texttt{{{escaped(name)}}}", *map(escaped, cells)]
    missing = width - len(shown)
    if missing:
      reason = rf"\multicolumn{{{missing + 1}}}{{l}}{{{shown[-1]}}}"
      shown[-1] = reason
    lines.append(f"  {' & '.join(shown)} \\\\")
  return [*lines, r"  \bottomrule", r"\end{tabular}"]


def _line(cells: Sequence[str]) -> str:
  return f"  {' & '.join(map(escaped, cells))} \\\\"
