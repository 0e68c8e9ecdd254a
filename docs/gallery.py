"""Prints a card per mechanism, from the registry and docs/mechanisms.md.

Usage: `python -m docs.gallery`. JAX traces the code of every card first.
"""

import re

from docs.mechanism_pages import ARRAYS, Section, example, sections


def page() -> str:
  """Returns the arrays that all cards use, and one card per mechanism."""
  grid = "\n".join(
    [
      "::::::{grid} 1 1 1 2",
      ":gutter: 2",
      ":class-container: gallery",
      "",
      *(_card(name, section) for name, section in sections().items()),
      "::::::",
    ]
  )
  return f"```python\n{ARRAYS}```\n\n{grid}\n"


def _card(name: str, section: Section) -> str:
  """Returns a card with the table row and the section of a mechanism."""
  picture = re.search(r"^!\[.*", section.text, re.M)
  formula = re.search(r"^```math\n.*?^```$", section.text, re.M | re.S)
  links = dict(re.findall(r"\[(definition|code)\]\((.*?)\)", section.sources))
  papers = re.findall(r"arxiv\.org/abs/(\d{4}\.\d{4,5})", section.sources)
  if not (picture and formula) or len(links) < 2:
    raise ValueError(
      f"docs/mechanisms.md, {name}: no picture, formula or links"
    )
  # Some mechanisms come from a report that is not on arXiv.
  paper = f" ·\n[paper](https://arxiv.org/abs/{papers[0]})" if papers else ""
  return f"""\
:::::{{grid-item-card}}
**[`{name}`](mechanisms.md#{name})**: {section.idea}

{picture[0]}

{formula[0]}

Time {section.time}

```python
{example(name)}
```

[Definition]({links["definition"]}) · [code]({links["code"]}){paper}
:::::
"""


if __name__ == "__main__":
  print(page(), end="")
