"""Every picture of a page says what in it belongs to which mechanism."""

import re
from xml.etree import ElementTree

import pytest

from reports import comparison_maps, figures, plots, style, summary, svg
from reports import scaling as scaling_lib
from tests.reports import made_up

DECAY = "my_package.my.module:decay"
"""In place of linear: with a full name, of which pictures show the end."""


def attribute(element):
  return element.get("data-mechanism")


@pytest.fixture(scope="module")
def found():
  return [
    record | {"attention": {"linear": DECAY}.get(record["attention"], "dense")}
    for record in made_up.across()
    if record["attention"] != "lsh"
  ]


@pytest.fixture(scope="module")
def styles(found):
  return style.styles(record["attention"] for record in found)


@pytest.fixture(scope="module")
def drawn(found, styles):
  """A figure of every kind, its first panel alone."""
  summaries = summary.summarize(found)["recall"]
  rows = [
    row | {"mechanism": {"linear": DECAY}.get(row["mechanism"], "dense")}
    for row in made_up.scaling()
  ]
  every = [
    *plots.of_task("recall", summaries, styles, {}),
    *comparison_maps.of_task("recall", summaries),
    *scaling_lib.figures(rows, styles)[:1],
  ]
  assert {one.stem.partition("-")[0] for one in every} == {
    "capacity",
    "lengths",
    "quality",
    "curves",
    "memory",
    "maps",
    "scaling",
  }
  return [
    one._replace(panels=dict(list(one.panels.items())[:1])) for one in every
  ]


@pytest.fixture(scope="module")
def inline(drawn):
  """Stem -> the panel as an element, where it is not of one mechanism alone."""
  return {
    one.stem: ElementTree.fromstring(next(iter(figures.inline(one).values())))
    for one in drawn
    if not one.mechanisms
  }


def owned(element, owner=None):
  """Every element below one, and the mechanism that it is marked as."""
  for child in element:
    mark = attribute(child) or owner
    yield child, mark
    yield from owned(child, mark)


def test_what_has_a_mechanisms_colour_or_name_is_marked_as_it(inline, styles):
  color = f"var(--m{styles[DECAY].slot})"
  for stem, panel in inline.items():
    elements = [*owned(panel)]
    colored = {who for one, who in elements if color in one.get("style", "")}
    assert colored == {DECAY}, stem
    names = {one.text: who for one, who in elements if one.tag == "text"}
    assert names["dense"] == "dense", stem
    assert names["module:decay"] == DECAY, stem
    for mechanism in ("dense", DECAY):
      tags = {one.tag for one, who in elements if who == mechanism}
      assert tags & {"path", "use"}, stem


def test_axes_belong_to_nobody(inline):
  for stem, panel in inline.items():
    texts = [
      one for one, who in owned(panel) if one.tag == "text" and who is None
    ]
    assert len(texts) > 3, stem


def test_rows_of_dots_lose_mark_and_name(inline):
  marked = [
    one for one, _ in owned(inline["memory-recall"]) if attribute(one) == DECAY
  ]
  assert len(marked) == 2
  texts = [text.text for one in marked for text in one.iter("text")]
  assert texts == ["module:decay"]


def test_maps_are_panels_of_one_mechanism(drawn):
  maps = next(one for one in drawn if one.stem.startswith("maps"))
  assert {maps.mechanisms[name] for name in maps.panels} <= {"dense", DECAY}
  assert all(name.startswith(maps.mechanisms[name]) for name in maps.panels)
  assert set(maps.mechanisms.values()) == {"dense", DECAY}


def test_files_have_no_marks(drawn, tmp_path):
  memory = next(one for one in drawn if one.stem.startswith("memory"))
  scatter = next(one for one in drawn if one.stem.startswith("quality"))
  figures.save(tmp_path, [memory, scatter])
  for path in tmp_path.glob("*.svg"):
    assert "mechanism" not in path.read_text()
    assert 'id="text_1"' in path.read_text()


def test_a_label_is_escaped():
  label = "a<b>&\"c':1.5"
  escaped = "a&lt;b&gt;&amp;&quot;c':1.5"
  source = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="1" height="1" version="1">'
    f'<g id="mechanism:{escaped}"/><g id="line2d_1"/></svg>'
  )
  markup = svg.adapted(source.encode(), "u", "t")
  assert re.findall(r"<g[^>]*>", markup)[1] == "<g />"
  assert attribute(ElementTree.fromstring(markup)[0]) == label
