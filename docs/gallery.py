"""Cards of all mechanisms, from the registry and docs/mechanisms.md.

`python -m docs.gallery` prints them. The code of each card is traced by JAX first.
"""

import re

from docs.mechanism_pages import ARRAYS, Section, example, sections


def page() -> str:
  """What the code of all cards begins with, and a card a mechanism."""
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
  """The card of a mechanism: its row of the opening table, and its section."""
  picture = re.search(r"^!\[.*", section.text, re.M)
  formula = re.search(r"^```math\n.*?^```$", section.text, re.M | re.S)
  links = dict(re.findall(r"\[(definition|code)\]\((.*?)\)", section.sources))
  papers = re.findall(r"arxiv\.org/abs/(\d{4}\.\d{4,5})", section.sources)
  if not (picture and formula) or len(links) < 2:
    raise ValueError(
      f"docs/mechanisms.md, {name}: no picture, formula or links"
    )
  # Some mechanisms are described in a report without an address on arXiv.
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
