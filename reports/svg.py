"""Matplotlib's SVG as an element of a page: small, and in the page's colours."""

from collections.abc import Sequence
import re
from xml.etree import ElementTree

from reports import marks, style

_NAMESPACE = re.compile(r"\{[^}]*\}")
_REFERENCE = re.compile(r"url\(#([^)]+)\)|^#(.+)$")
_FONT = re.compile(r"font-family: [^;]*(; |$)")
_COLORS = {"#000000": "currentColor"} | {
  light: f"var(--m{slot})"
  for slot, (light, _) in enumerate(style.PALETTE)
  if slot
}
_COLOR = re.compile("|".join(_COLORS))
_DROPPED = ("metadata", "style")
_LONG = 400


def adapted(svg: bytes, unique: str, title: str) -> str:
  """The same picture as an `<svg>` element that shares a page with others.

  Black becomes the page's ink and a colour of the palette its variable `--m1`,
  `--m2`, …; fonts are left to the page. What is marked as a mechanism's says so
  in `data-mechanism`.

  Args:
    svg: what matplotlib wrote.
    unique: begins every id, so that no two pictures share one.
    title: what a screen reader says.
  """
  root = ElementTree.fromstring(svg)
  elements = list(root.iter())
  for element in elements:
    element.tag = _NAMESPACE.sub("", element.tag)
  for element in elements:
    for child in [child for child in element if child.tag in _DROPPED]:
      element.remove(child)
  used = {
    name
    for element in elements
    for value in element.attrib.values()
    for name in _references(value)
  }
  for element in elements:
    _adapt(element, unique, used)
  for name in ("width", "height", "version"):
    root.attrib.pop(name)
  root.attrib |= {"role": "img", "aria-label": title}
  return ElementTree.tostring(root, encoding="unicode")


def _adapt(element: ElementTree.Element, unique: str, used: set[str]) -> None:
  attributes = {}
  for name, value in element.attrib.items():
    name = _NAMESPACE.sub("", name)
    if name == "id":
      if value.startswith(marks.PREFIX):
        attributes["data-mechanism"] = value.removeprefix(marks.PREFIX)
      elif value in used:
        attributes[name] = f"{unique}-{value}"
      continue
    if value.startswith("data:"):
      value = "".join(value.split())
    elif name == "style":
      value = _COLOR.sub(lambda m: _COLORS[m[0]], _FONT.sub("", value))
    elif name in ("d", "x", "y", "transform"):
      value = _numbers(value)
    for reference in _references(value):
      value = value.replace(f"#{reference}", f"#{unique}-{reference}")
    # Most text is turned by nothing.
    if not value.startswith("rotate(-0 "):
      attributes[name] = value
  element.attrib.clear()
  element.attrib.update(attributes)
  if element.tag != "text":
    element.text = None
  element.tail = None


def _numbers(text: str) -> str:
  """Fewer digits, and one fewer in long paths, where they are most of it."""
  digits = 1 if len(text) > _LONG else 2
  short = re.sub(rf"(\.\d{{{digits}}})\d+", r"\1", " ".join(text.split()))
  return re.sub(r" ?([MLCQz]) ?", r"\1", short).replace(" -", "-")


def _references(value: str) -> Sequence[str]:
  return [a or b for a, b in _REFERENCE.findall(value)]
