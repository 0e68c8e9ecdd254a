"""A page a mechanism, made when the site is built.

`python -m docs.mechanism_pages delta` prints one.

docs/mechanisms.md has the rows and the sections of all of them, and so is one page
for a reader of the repository. On the site it keeps the opening table, and each
section becomes the page mechanisms/NAME with what the code, docs/library.md,
docs/agreement.md and the records of comparisons say of the mechanism.
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
"""What the code of every page begins with: [B, T, N, H] and [B, T, F]."""

_COMMON = ("mask", "is_causal", "scale")
_SHARED = (
  attention.dense_attention,
  attention.flash_attention,
  attention.gated_linear_attention,
)
"""Functions whose docstrings say what options of other ones mean, too."""

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
"""Column -> its records in docs/, and what was solved."""


class Section(NamedTuple):
  """What docs/mechanisms.md has of a mechanism."""

  idea: str
  time: str
  text: str
  """Picture, formula and prose."""
  sources: str
  """The last line: papers, definition and code."""


@functools.cache
def sections() -> Mapping[str, Section]:
  """Mechanism -> its row and section of docs/mechanisms.md."""
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
  """docs/mechanisms.md as the site has it: sections are pages of their own.

  Rows keep the anchors of sections.
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
  """A file for each page, whose text comes from `page` when it is read."""
  for name in ATTENTIONS:
    (FOLDER / f"{name}.md").write_text(
      f"`python -m docs.mechanism_pages {name}` prints this page.\n", "utf-8"
    )


def page(name: str) -> str:
  """The page of a mechanism, with links as from docs/."""
  section = sections()[name]
  parts = [
    f"# `{name}`",
    f"{_capital(section.idea)}. Time of a head: {section.time} ([letters](mechanisms.md)).",
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
  """The public function of a mechanism, or the one whose gates it makes."""
  own = getattr(attention, f"{name}_attention", None)
  module = ATTENTIONS[name].__module__.rpartition(".")[2]
  return own or getattr(attention, f"{module}_attention", None)


def _cost(name: str) -> str:
  """Time and memory as docstrings say them, with those that they add to."""
  texts = []
  item = ATTENTIONS[name] if _sentence(ATTENTIONS[name]) else function(name)
  while sentence := _sentence(item):
    texts.append(sentence)
    item = None
    if other := re.search(r"[Tt]hat of `(\w+)`", sentence):
      texts.append(f"The cost of `{other[1]}`:")
      item = getattr(attention, other[1])
  return "\n\n".join(texts)


def _sentence(item: Any) -> str:
  """The paragraph on cost of a docstring."""
  text = inspect.getdoc(item) or "" if item else ""
  found = re.search(r"^Cost[:,] (.*?)(?:\n\n|\Z)", text, re.M | re.S)
  return _capital(" ".join(found[1].split())) if found else ""


def _uses(name: str) -> str:
  """The rows of the choice of a mechanism that name it."""
  table = _between(_read("library.md"), "## Which mechanism should I pick?")
  rows = [row.strip("|").split(" | ") for row in _rows(table)]
  return "".join(
    f"- {_capital(you_want.strip())}: {take.strip()}\n"
    for you_want, take in rows
    if f"`{name}`" in take
  )


def _options(name: str) -> str:
  """Tables of what the factory, and so a config, and the function take."""
  factory, called = ATTENTIONS[name], function(name)
  texts = []
  taken = inspect.signature(factory).parameters.values()
  if taken:
    rows = _describe(taken, factory)
    texts.append(f"Of the factory `{name}`, and of a config:\n\n{rows}")
  else:
    texts.append(f"The factory `{name}` takes none.")
  if called:
    options = [
      x
      for x in inspect.signature(called).parameters.values()
      if x.kind is x.KEYWORD_ONLY and x.name not in _COMMON
    ]
    rows = _describe(options, called)
    texts.append(
      f"Of the function `{called.__name__}`, beside `mask`, `is_causal` and "
      f"`scale`:\n\n{rows}"
    )
  links = "[functions](reference/functions.md), [factories]"
  return "\n\n".join(
    [*texts, f"More in the reference: {links}(reference/factories.md)."]
  )


def _describe(options: Iterable[inspect.Parameter], item: Any) -> str:
  """Options, their defaults, and what the docstring says of them."""
  said: dict[str, str] = {}
  for source in (*_SHARED, item):
    text = inspect.getdoc(source) or ""
    said |= re.findall(r"^  (\w+): (.*(?:\n    .*)*)", text, re.M)
  lines = ["| option | meaning |", "| --- | --- |"]
  for option in options:
    default = option.default
    shown = getattr(default, "__name__", repr(default))
    text = "" if default is option.empty else f"={shown}"
    meaning = " ".join(said.get(option.name, "").split()).rstrip(".")
    escaped = meaning.replace("|", "\\|").replace("*", "\\*")
    lines.append(f"| `{option.name}{text}` | {escaped} |")
  return "\n".join(lines)


def _capabilities(name: str) -> str:
  """What calls the record supports, in the words of the error messages."""
  record = mechanisms.example(ATTENTIONS[name])
  can = ", ".join(
    f"`{x}`" for x in mechanisms.CAPABILITIES if x in record.supports
  )
  only = " It is causal only." if record.causal_only else ""
  table = "library.md#what-each-mechanism-can-do"
  return f"[`supports`]({table}): {can or 'nothing else'}.{only}"


def _witnesses(name: str) -> str:
  """Rows of docs/agreement.md: programs, and where they disagree."""
  text = _read("agreement.md")
  table = text[: text.index("## Where peers disagree")]
  lines = []
  for row in _rows(table):
    mechanism, witness, *_, results, gradients, definition, _ = _cells(row)
    if mechanism == f"`{name}`":
      shown = (x or "–" for x in (results, gradients, definition))
      lines.append(f"| {witness} | {' | '.join(shown)} |")
  apart = [
    f"- {_capital(who_does_what)}. Here: {here}."
    for mechanism, who_does_what, here in map(
      _cells, _rows(_between(text, "## Where peers disagree"))
    )
    if f"`{name}`" in mechanism
  ]
  found = "*Definition only*: no other program was found."
  if lines:
    head = "| program | results | gradients | definition |\n"
    found = "\n".join([f"{head}| --- | --- | --- | --- |", *lines])
    found += (
      "\n\nThe largest differences, as shares of the largest value"
      " ([all of them](agreement.md))."
    )
  disagree = ["Where they disagree:\n\n" + "\n".join(apart)] if apart else []
  return "\n\n".join([found, *disagree])


@functools.cache
def _solved_seeds() -> Mapping[str, Mapping[str, str]]:
  """Mechanism -> column -> seeds that solved the task."""
  from docs import results

  sources = " ".join(f"{x}={y}" for x, (y, _) in _RESULTS.items())
  names = "".join(
    f"| `{name}` |{' – |' * len(_RESULTS)}\n" for name in ATTENTIONS
  )
  head = (
    f"| mechanism | {' | '.join(_RESULTS)} |\n|{' --- |' * (len(_RESULTS) + 1)}"
  )
  table = f"<!-- overview: {sources} -->\n{head}\n{names}<!-- end -->"
  rows = map(_cells, _rows(results.remade(table, DOCS)))
  return {
    name.strip("`"): dict(zip(_RESULTS, cells, strict=True))
    for name, *cells in rows
  }


def _results_of(name: str) -> str:
  solved = {x: y for x, y in _solved_seeds()[name].items() if y != "–"}
  lines = [
    f"- {_RESULTS[column][1]}: "
    + re.sub(r"(\d+ of \d+)\*", r"with `max_rate=2` \1", seeds)
    .replace(" <sup>e</sup>", " (rate at the edge of its grid)")
    .replace(" <sup>h</sup>", " (at a rate that halving had stopped)")
    for column, seeds in solved.items()
  ]
  if not lines:
    return "No comparison on this site has trained it ([results](results.md))."
  return "\n".join(
    ["Seeds that solved\n", *lines, "\n[All results](results.md)."]
  )


def _between(text: str, heading: str) -> str:
  """The section of a heading of the second level."""
  return text.partition(f"{heading}\n")[2].partition("\n## ")[0]


def _rows(text: str) -> list[str]:
  """Lines of a table, without its head."""
  lines = [line for line in text.splitlines() if line.startswith("|")]
  return lines[2:]


def _capital(sentence: str) -> str:
  return sentence[0].upper() + sentence[1:]


def _cells(row: str) -> list[str]:
  return [cell.strip() for cell in row.strip().strip("|").split("|")]


def example(name: str) -> str:
  """The lines that call a mechanism, which JAX has traced.

  A function is called by its name where its options are plain values, and through
  the record of its factory where they are arrays.
  """
  factory = ATTENTIONS[name]
  record = mechanisms.example(factory)
  sizes = record.sizes.short
  call = ", is_causal=True" if "causal" in record.supports else ""
  function = getattr(attention, f"{name}_attention", None)
  needed = {
    p.name
    for p in inspect.signature(function or factory).parameters.values()
    if p.kind is p.KEYWORD_ONLY and p.default is p.empty
  }
  if function and needed <= sizes.keys():
    options = "".join(f", {k}={sizes[k]!r}" for k in sizes if k in needed)
    lines = [
      f"from attention import {name}_attention",
      f"out = {name}_attention(query, key, value{options}{call})",
    ]
  else:
    options = ", ".join(f"{k}={v!r}" for k, v in sizes.items())
    arrays = "query, key, value"
    if "shared_qk" in record.supports:
      arrays = "query, None, value"
    if "own_keys" in record.supports:
      arrays = "query, None, None"
    lines = [
      f"from attention import Dims, {name}",
      f"record = {name}({options})",
      "variables = record.init(jax.random.key(0), Dims(8, 8, 16, 64, 128))",
    ]
    if record.gates:
      lines.append("gates = record.gates(variables, inputs)")
      call += ", **gates"
    lines.append(f"out = record.apply(variables, {arrays}{call})")
  code = "\n".join(lines)

  def traced():
    names: dict[str, jax.Array] = {}
    exec(ARRAYS + code, names)
    return names["out"]

  if jax.eval_shape(traced).shape != (2, 64, 8, 16):
    raise ValueError(f"{name}: its page gives an array of another shape")
  return code


if __name__ == "__main__":
  print(page(sys.argv[1]), end="")
