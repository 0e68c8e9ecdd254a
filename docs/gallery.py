"""Cards of all mechanisms, from the registry and docs/mechanisms.md.

`python -m docs.gallery` prints them. The code of each card is traced by JAX first.
"""

import inspect
import pathlib
import re

import jax

import attention
from attention import ATTENTIONS, plug

_PAGE = pathlib.Path(__file__).parent / "mechanisms.md"

ARRAYS = """\
import jax

query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 8, 16))
inputs = jax.random.normal(jax.random.key(1), (2, 64, 128))
"""
"""What the code of every card begins with: [B, T, N, H] and [B, T, F]."""


def page() -> str:
  """What the code of all cards begins with, and a card a mechanism."""
  opening, *sections = re.split(r"^## ", _PAGE.read_text("utf-8"), flags=re.M)
  section = {text.split("\n")[0].strip("`"): text for text in sections}
  rows = re.findall(r"^\| \[`(\w+)`\](?:\(\S+\)) \| (.*) \|$", opening, re.M)
  costs = {name: cells.split(" | ") for name, cells in rows}
  cards = (_card(name, section[name], *costs[name]) for name in ATTENTIONS)
  grid = "\n".join(
    [
      "::::::{grid} 1 1 1 2",
      ":gutter: 2",
      ":class-container: gallery",
      "",
      *cards,
      "::::::",
    ]
  )
  return f"```python\n{ARRAYS}```\n\n{grid}\n"


def _card(name: str, section: str, idea: str, time: str) -> str:
  """The card of a mechanism: its row of the opening table, and its section."""
  picture = re.search(r"^!\[.*", section, re.M)
  formula = re.search(r"(?:^    .*\n)+", section, re.M)
  links = dict(re.findall(r"\[(definition|code)\]\((.*?)\)", section))
  if not picture or not formula or len(links) < 2:
    raise ValueError(
      f"docs/mechanisms.md, {name}: no picture, formula or links"
    )
  equations = re.sub(r" {4,}", "\n", inspect.cleandoc(formula[0]))
  papers = re.findall(r"arxiv\.org/abs/(\d{4}\.\d{4,5})", section)
  return f"""\
:::::{{grid-item-card}}
**[`{name}`](mechanisms.md#{name})**: {idea}

{picture[0]}

```text
{equations}
```

Time {time}

```python
{example(name)}
```

[Definition]({links["definition"]}) · [code]({links["code"]}) ·
[paper](https://arxiv.org/abs/{papers[0]})
:::::
"""


def example(name: str) -> str:
  """The lines that call a mechanism, which JAX has traced.

  A function is called by its name where its options are plain values, and through
  the record of its factory where they are arrays.
  """
  factory = ATTENTIONS[name]
  record = plug.example(factory)
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
    raise ValueError(f"{name}: its card gives an array of another shape")
  return code


if __name__ == "__main__":
  print(page(), end="")
