"""Checks of a built site: links inside it, and texts of its pictures.

    python -m docs.check_site docs/_build/html

Prints what is wrong, and ends with 1 if anything is. Addresses of the web are not
visited.
"""

from html.parser import HTMLParser
from pathlib import Path
import sys
from urllib.parse import unquote, urldefrag


class _Page(HTMLParser):
  """Links, anchors and pictures of a page."""

  def __init__(self, text: str):
    super().__init__()
    self.links: list[str] = []
    self.anchors = {"", "top"}
    self.silent: list[str] = []
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
      self.silent.append(values.get("src") or "")


def faults(site: Path) -> list[str]:
  """A line for every link that leads nowhere and every picture without a text."""
  pages = {
    path.resolve(): _Page(path.read_text("utf-8"))
    for path in site.rglob("*.html")
    if "_static" not in path.parts
  }
  lines = []
  for path, page in pages.items():
    name = path.relative_to(site.resolve())
    lines += [f"{name}: no alternative text of {x}" for x in page.silent]
    # The page for what is not there has links from the root of a server.
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
  found = faults(Path(sys.argv[1]))
  print("\n".join(found))
  sys.exit(bool(found))
