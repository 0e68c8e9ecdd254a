"""The tables of a comparison as LaTeX."""

import shutil
import subprocess

import pytest

from reports import latex
from tests.reports import made_up

PAPER = r"""\documentclass{article}
\usepackage{booktabs}
\begin{document}
%s
\end{document}
"""


def test_every_row_has_the_columns_of_its_header():
  text = latex.report(made_up.records())
  tables = text.split(r"\begin{tabular}")[1:]
  assert len(tables) >= 3
  for one in tables:
    columns, *lines = one.splitlines()
    width = columns.count("l") + columns.count("r")
    rows = [line for line in lines if line.endswith(r" \\")]
    for row in rows:
      spans = row.count(r"\multicolumn")
      cells = row.count(" & ") + 1
      assert cells == width or (spans == 1 and cells < width), row
  assert r"\texttt{dense} & " in text
  assert r"exact\_match" in text
  # Two seeds each: their means cannot be told apart.
  assert r"0.9600 [0.4673, 0.9985] $\approx$" in text
  assert "failed: exit code 1" in text


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("100 % of a_b & {c}", r"100 \% of a\_b \& \{c\}"),
    ("1 ± 2 ≈", r"1 $\pm$ 2 $\approx$"),
    ("a\\b", r"a\textbackslash{}b"),
  ],
)
def test_characters_are_escaped(text, expected):
  assert latex.escaped(text) == expected


@pytest.mark.skipif(
  shutil.which("pdflatex") is None, reason="needs pdflatex, which is not here"
)
def test_it_can_be_set(tmp_path):
  paper = PAPER % latex.report(made_up.records())
  (tmp_path / "paper.tex").write_text(paper, "utf-8")
  subprocess.run(
    ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
    cwd=tmp_path,
    check=True,
    capture_output=True,
    timeout=120,
  )
  assert (tmp_path / "paper.pdf").stat().st_size > 1000
