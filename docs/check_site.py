"""Checks the links and the alternative texts of a built site.

    python -m docs.check_site docs/_build/html

Prints every fault and exits with 1 if there are any. Links to other sites are
not checked.
"""

from html.parser import HTMLParser
from pathlib import Path
import sys
from urllib.parse import unquote, urldefrag


class _Page(HTMLParser):
  """The links, anchors and pictures without a text of a page."""

  def __init__(self, text: str):
    super().__init__()
    self.links: list[str] = []
    self.anchors = {"", "top"}
    self.without_alt: list[str] = []
    self.feed(text)

  def handle_starttag(
    self, tag: str, attrs: list[tuple[str, str | None]]
  ) -> None:
    values = dict(attrs)
    self.anchors |= {values[x] or "" for x in ("id", "name") if x in values}
    link = values.get("src" if tag in ("img", "script") else "href")
    if link and tag != "link":
      self.links.append(link)
    if tag == "img" and not values.get("alt"):
      self.without_alt.append(values.get("src") or "")


def faults(site: Path) -> list[str]:
  """Returns one line per broken link and per picture without a text."""
  pages = {
    path.resolve(): _Page(path.read_text("utf-8"))
    for path in site.rglob("*.html")
    if "_static" not in path.parts
  }
  lines = []
  for path, page in pages.items():
    name = path.relative_to(site.resolve())
    lines += [f"{name}: no alternative text of {x}" for x in page.without_alt]
    # A server shows 404.html at any address, so its links start at the root.
    root = site if name.name == "404.html" else path.parent
    for link in page.links:
      if ":" in link.partition("/")[0] or link.startswith("//"):
        continue
      file, anchor = urldefrag(unquote(link))
      file = file.partition("?")[0]
      target = (root / file.lstrip("/")).resolve() if file else path
      if target.is_dir():
        target /= "index.html"
      if not target.exists():
        lines.append(f"{name}: no {link}")
      elif target in pages and anchor not in pages[target].anchors:
        lines.append(f"{name}: no anchor {link}")
  return lines


if __name__ == "__main__":
  lines = faults(Path(sys.argv[1]))
  print("\n".join(lines))
  sys.exit(bool(lines))
