"""Generates one page per mechanism when the site is built.

`python -m docs.mechanism_pages delta` prints one.

In the repository, docs/mechanisms.md is a single page with a table and a section per
mechanism. On the site it keeps the table, and each section becomes the page
mechanisms/NAME, with facts from the code, docs/library.md, docs/agreement.md and the
records of comparisons.
"""

from collections.abc import Iterable, Mapping
import functools
import inspect
from pathlib import Path
import re
import sys
from typing import Any, NamedTuple

import jax

import attention
from attention import ATTENTIONS
from attention import mechanism as mechanisms

DOCS = Path(__file__).parent
FOLDER = DOCS / "mechanisms"

ARRAYS = """\
import jax

query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 8, 16))
inputs = jax.random.normal(jax.random.key(1), (2, 64, 128))
"""
"""The first lines of the code of every page: `[B, T, N, H]` and `[B, T, F]`."""

_COMMON = ("mask", "is_causal", "scale")
_SHARED_DOCS = (
  attention.dense_attention,
  attention.flash_attention,
  attention.gated_linear_attention,
)
"""Functions whose docstrings also describe options of other functions."""

_RESULTS = {
  "recall": (
    "results/capacity.jsonl.xz+recall_discarded.jsonl.xz",
    "recall of 16 pairs at width 64",
  ),
  "parity": (
    "results/parity.jsonl.xz",
    "parity at eight times the trained length",
  ),
  "S_3": (
    "results/s3.jsonl.xz",
    "permutations of 3 letters at eight times the trained length",
  ),
}
"""Column -> its records in docs/, and the task."""


class Section(NamedTuple):
  """The parts of docs/mechanisms.md that describe one mechanism."""

  idea: str
  time: str
  text: str
  """Picture, formula and prose."""
  sources: str
  """The last line: papers, definition and code."""


@functools.cache
def sections() -> Mapping[str, Section]:
  """Returns mechanism -> its row and section of docs/mechanisms.md."""
  opening, *parts = re.split(r"^## ", _read("mechanisms.md"), flags=re.M)
  texts = {part.split("\n")[0].strip("`"): part for part in parts}
  rows = re.findall(
    r"^\| \[`(\w+)`\](?:\(\S+\)) \| (.*) \| (.*) \|$", opening, re.M
  )
  content = {}
  for name, idea, time in rows:
    text = texts[name].partition("\n")[2].strip()
    text, _, sources = text.rpartition("\n\n")
    content[name] = Section(idea, time, text, sources)
  return content


def overview(text: str) -> str:
  """Returns docs/mechanisms.md without the sections that become pages.

  The rows of the table get the anchors of these sections.
  """
  opening, *parts = re.split(r"^(?=## )", text, flags=re.M)
  names = "|".join(ATTENTIONS)
  opening = re.sub(
    rf"\[`({names})`\]\(#\1\)",
    r'<span id="\1"></span>[`\1`](mechanisms/\1.md)',
    opening,
  )
  shared = [part for part in parts if not re.match(rf"## `({names})`", part)]
  pages = "\n".join(f"mechanisms/{name}" for name in ATTENTIONS)
  contents = f"\n```{{toctree}}\n:hidden:\n\n{pages}\n```\n"
  return opening + "".join(shared) + contents


def write() -> None:
  """Writes a placeholder per page; `docs.pages` replaces its text."""
  for name in ATTENTIONS:
    (FOLDER / f"{name}.md").write_text(
      f"`python -m docs.mechanism_pages {name}` prints this page.\n", "utf-8"
    )


def page(name: str) -> str:
  """Returns the page of a mechanism, with links relative to docs/."""
  section = sections()[name]
  parts = [
    f"# `{name}`",
    f"{_capital(section.idea)}. Time per head: {section.time} ([letters](mechanisms.md)).",
    section.text,
    section.sources,
    "## Call it",
    f"```python\n{ARRAYS}\n{example(name)}\n```",
    *_part("Cost", _cost(name)),
    *_part("When to use it", _uses(name)),
    "## Options",
    _options(name),
    _capabilities(name),
    "## Witnesses",
    _witnesses(name),
    "## Results",
    _results_of(name),
  ]
  return "\n\n".join(parts) + "\n"


def _part(title: str, text: str) -> list[str]:
  return [f"## {title}", text] if text else []


@functools.cache
def _read(name: str) -> str:
  return (DOCS / name).read_text("utf-8")


def function(name: str) -> Any:
  """Returns the public function of a mechanism, or the one that it calls."""
  own = getattr(attention, f"{name}_attention", None)
  module = ATTENTIONS[name].__module__.rpartition(".")[2]
  return own or getattr(attention, f"{module}_attention", None)


def _cost(name: str) -> str:
  """Returns the cost from the docstring, and the costs that it refers to."""
  texts = []
  item = ATTENTIONS[name]
  item = item if _cost_paragraph(item) else function(name)
  while paragraph := _cost_paragraph(item):
    texts.append(paragraph)
    item = None
    if other := re.search(r"[Tt]hat of `(\w+)`", paragraph):
      texts.append(f"The cost of `{other[1]}`:")
      item = getattr(attention, other[1])
  return "\n\n".join(texts)


def _cost_paragraph(item: Any) -> str:
  """Returns the paragraph of a docstring that states the cost."""
  text = inspect.getdoc(item) or "" if item else ""
  cost = re.search(r"^Cost[:,] (.*?)(?:\n\n|\Z)", text, re.M | re.S)
  return _capital(" ".join(cost[1].split())) if cost else ""


def _uses(name: str) -> str:
  """Returns the rows of docs/library.md that recommend a mechanism."""
  table = _between(_read("library.md"), "## Which mechanism should I pick?")
  rows = [row.strip("|").split(" | ") for row in _rows(table)]
  return "".join(
    f"- {_capital(need.strip())}: {choice.strip()}\n"
    for need, choice in rows
    if f"`{name}`" in choice
  )


def _options(name: str) -> str:
  """Returns tables of the options of the factory and of the function."""
  factory, fn = ATTENTIONS[name], function(name)
  texts = []
  hyperparameters = inspect.signature(factory).parameters.values()
  if hyperparameters:
    rows = _describe(hyperparameters, factory)
    texts.append(f"The factory `{name}`, also in a config:\n\n{rows}")
  else:
    texts.append(f"The factory `{name}` has no options.")
  if fn:
    options = [
      x
      for x in inspect.signature(fn).parameters.values()
      if x.kind is x.KEYWORD_ONLY and x.name not in _COMMON
    ]
    rows = _describe(options, fn)
    texts.append(
      f"The function `{fn.__name__}`, besides `mask`, `is_causal` and "
      f"`scale`:\n\n{rows}"
    )
  links = "[functions](reference/functions.md), [factories]"
  return "\n\n".join(
    [*texts, f"See also the reference: {links}(reference/factories.md)."]
  )


def _describe(options: Iterable[inspect.Parameter], item: Any) -> str:
  """Returns a table of options, their defaults and their meanings."""
  meanings: dict[str, str] = {}
  for source in (*_SHARED_DOCS, item):
    text = inspect.getdoc(source) or ""
    meanings |= re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.M)
  lines = ["| option | meaning |", "| --- | --- |"]
  for option in options:
    default = option.default
    value = getattr(default, "__name__", repr(default))
    text = "" if default is option.empty else f"={value}"
    meaning = " ".join(meanings.get(option.name, "").split()).rstrip(".")
    escaped = meaning.replace("|", "\\|").replace("*", "\\*")
    lines.append(f"| `{option.name}{text}` | {escaped} |")
  return "\n".join(lines)


def _capabilities(name: str) -> str:
  """Lists the capabilities of a mechanism, as error messages name them."""
  mechanism = mechanisms.example(ATTENTIONS[name])
  names = ", ".join(
    f"`{x}`" for x in mechanisms.CAPABILITIES if x in mechanism.supports
  )
  only = " It is causal only." if mechanism.causal_only else ""
  table = "library.md#what-each-mechanism-can-do"
  return f"[`supports`]({table}): {names or 'nothing else'}.{only}"


def _witnesses(name: str) -> str:
  """Returns the programs that docs/agreement.md compares, and their differences."""
  text = _read("agreement.md")
  table = text[: text.index("## Where peers disagree")]
  lines = []
  for row in _rows(table):
    mechanism, witness, *_, results, gradients, definition, _ = _cells(row)
    if mechanism == f"`{name}`":
      cells = (x or "–" for x in (results, gradients, definition))
      lines.append(f"| {witness} | {' | '.join(cells)} |")
  differences = [
    f"- {_capital(difference)}. Here: {here}."
    for mechanism, difference, here in map(
      _cells, _rows(_between(text, "## Where peers disagree"))
    )
    if f"`{name}`" in mechanism
  ]
  text = "*Definition only*: no other program was found."
  if lines:
    head = "| program | results | gradients | definition |\n"
    text = "\n".join([f"{head}| --- | --- | --- | --- |", *lines])
    text += (
      "\n\nThe largest differences, relative to the largest value"
      " ([all mechanisms](agreement.md))."
    )
  if differences:
    text += "\n\nWhere programs disagree:\n\n" + "\n".join(differences)
  return text


@functools.cache
def _solved_seeds() -> Mapping[str, Mapping[str, str]]:
  """Returns mechanism -> column -> seeds that solved the task."""
  from docs import results

  sources = " ".join(f"{x}={y}" for x, (y, _) in _RESULTS.items())
  names = "".join(
    f"| `{name}` |{' – |' * len(_RESULTS)}\n" for name in ATTENTIONS
  )
  head = (
    f"| mechanism | {' | '.join(_RESULTS)} |\n|{' --- |' * (len(_RESULTS) + 1)}"
  )
  table = f"<!-- overview: {sources} -->\n{head}\n{names}<!-- end -->"
  rows = map(_cells, _rows(results.regenerate(table, DOCS)))
  return {
    name.strip("`"): dict(zip(_RESULTS, cells, strict=True))
    for name, *cells in rows
  }


def _results_of(name: str) -> str:
  solved = {x: y for x, y in _solved_seeds()[name].items() if y != "–"}
  lines = [
    f"- {_RESULTS[column][1]}: "
    + re.sub(r"(\d+ of \d+)\*", r"with `max_rate=2` \1", seeds)
    .replace(" <sup>e</sup>", " (learning rate at the edge of its grid)")
    .replace(" <sup>h</sup>", " (at a learning rate that halving had stopped)")
    for column, seeds in solved.items()
  ]
  if not lines:
    return "No comparison on this site trains it ([results](results.md))."
  return "\n".join(
    ["Seeds that solved a task:\n", *lines, "\n[All results](results.md)."]
  )


def _between(text: str, heading: str) -> str:
  """Returns the section under a heading of the second level."""
  return text.partition(f"{heading}\n")[2].partition("\n## ")[0]


def _rows(text: str) -> list[str]:
  """Returns the lines of a table without its header."""
  lines = [line for line in text.splitlines() if line.startswith("|")]
  return lines[2:]


def _capital(sentence: str) -> str:
  return sentence[0].upper() + sentence[1:]


def _cells(row: str) -> list[str]:
  return [cell.strip() for cell in row.strip().strip("|").split("|")]


def example(name: str) -> str:
  """Returns code that calls a mechanism, after JAX has traced it.

  It calls the function by name if its options are plain values, and the `apply` of
  the mechanism if they are arrays.
  """
  factory = ATTENTIONS[name]
  mechanism = mechanisms.example(factory)
  sizes = mechanism.sizes.short
  call = ", is_causal=True" if "causal" in mechanism.supports else ""
  fn = getattr(attention, f"{name}_attention", None)
  required = {
    p.name
    for p in inspect.signature(fn or factory).parameters.values()
    if p.kind is p.KEYWORD_ONLY and p.default is p.empty
  }
  if fn and required <= sizes.keys():
    options = "".join(f", {k}={sizes[k]!r}" for k in sizes if k in required)
    lines = [
      f"from attention import {name}_attention",
      f"out = {name}_attention(query, key, value{options}{call})",
    ]
  else:
    options = ", ".join(f"{k}={v!r}" for k, v in sizes.items())
    arrays = "query, key, value"
    if "shared_qk" in mechanism.supports:
      arrays = "query, None, value"
    if "own_keys" in mechanism.supports:
      arrays = "query, None, None"
    lines = [
      f"from attention import Dims, {name}",
      f"mechanism = {name}({options})",
      "variables = mechanism.init(jax.random.key(0), Dims(8, 8, 16, 64, 128))",
    ]
    if mechanism.gates:
      lines.append("gates = mechanism.gates(variables, inputs)")
      call += ", **gates"
    lines.append(f"out = mechanism.apply(variables, {arrays}{call})")
  code = "\n".join(lines)

  def output():
    names: dict[str, jax.Array] = {}
    exec(ARRAYS + code, names)
    return names["out"]

  if jax.eval_shape(output).shape != (2, 64, 8, 16):
    raise ValueError(f"{name}: the code of its page returns another shape")
  return code


if __name__ == "__main__":
  print(page(sys.argv[1]), end="")
