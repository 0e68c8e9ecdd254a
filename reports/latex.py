"""The tables for a paper: LaTeX with booktabs."""

from collections.abc import Sequence

from comparison.records import Record
from reports import lengths, rows, sentences, summary, words

_ESCAPED = {
  "\\": r"\textbackslash{}",
  **{character: f"\\{character}" for character in "&%$#_{}"},
  "~": r"\textasciitilde{}",
  "^": r"\textasciicircum{}",
  "±": r"$\pm$",
  "−": "$-$",
  "≈": r"$\approx$",
  "–": "--",
  "·": r"$\cdot$",
  "×": r"$\times$",
}
"""Characters that pdfLaTeX does not print as they are."""


def report(found: Sequence[Record]) -> str:
  """Tables of quality and cost for each task, and those that only some have.

  These are BLEU, paired over sentences, and quality by length.

  Args:
    found: all records.
  """
  lines = [r"% \usepackage{booktabs}"]
  for task, summaries in summary.summarize(found).items():
    leaves = words.grid_leaves(summaries)
    quality = summary.quality_columns(summaries)
    made = rows.make(summaries, leaves, quality)
    lines += ["", f"% {task}: quality", *_table(made)]
    if pairs := sentences.pairs(summaries):
      lines += ["", f"% {task}: {sentences.title(pairs)}"]
      lines += [f"% {sentences.legend(pairs)}", *_table(sentences.table(pairs))]
    if by_length := lengths.table(summaries):
      lines += ["", f"% {task}: by length", *_table(by_length)]
    if costs := summary.cost_columns(summaries):
      made = rows.make(summaries, (), costs)
      lines += ["", f"% {task}: cost", *_table(made)]
  return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
  """What LaTeX prints as `text`."""
  return "".join(_ESCAPED.get(character, character) for character in text)


def _table(made: rows.Table) -> list[str]:
  header, body, left = made
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
