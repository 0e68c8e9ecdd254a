"""The page: whole by itself, escaped, small."""

import html.parser
import re

import pytest

from reports import page


@pytest.fixture(scope="module")
def markup(folder):
  return (folder / "report.html").read_text("utf-8")


class Reader(html.parser.HTMLParser):
  """Ids, references and elements of a page."""

  def __init__(self, markup):
    super().__init__()
    self.ids, self.references, self.tags, self.text = [], [], set(), []
    self.feed(markup)

  def handle_starttag(self, tag, attrs):
    self.tags.add(tag)
    for name, value in attrs:
      if name == "id":
        self.ids.append(value)
      elif name in ("src", "href", "srcset", "data", "poster", "action"):
        self.references.append(value)
      elif name in ("style", "clip-path"):
        self.references += re.findall(r"url\(([^)]*)\)", value)

  def handle_data(self, data):
    self.text.append(data)


def test_it_needs_no_other_file(markup):
  assert len(markup.encode()) < 2_000_000
  reader = Reader(markup)
  assert not {"link", "iframe", "object", "embed"} & reader.tags
  for reference in reader.references:
    assert reference.startswith(("#", "data:image/png;base64,"))
  style = re.search(r"<style>(.*?)</style>", markup, re.S)[1]
  assert "@import" not in style
  assert "url(" not in style
  assert "http" not in markup


def test_every_id_is_there_once(markup):
  reader = Reader(markup)
  assert len(set(reader.ids)) == len(reader.ids)
  wanted = {r[1:] for r in reader.references if r.startswith("#")}
  assert wanted <= set(reader.ids)


def test_what_comes_from_records_is_escaped(markup):
  assert "loss is &lt;nan&gt; at step 3" in markup
  assert "linear &amp; others &lt;cannot&gt; decode" in markup
  assert "&lt;b&gt;gone&lt;/b&gt;" in markup
  assert not {"nan", "cannot", "b"} & Reader(markup).tags


def test_it_says_what_how_and_on_what(markup):
  text = " ".join("".join(Reader(markup).text).split())
  assert "1 × cpu; jax 0.10.2" in text
  assert "Every mechanism ran at every point of the grid" in text
  assert "median time of a training step" in text
  assert "not supported: lsh: a | b" in text
  assert (
    "python train.py --config=configs/copy.py:dense --config.seed=0" in text
  )


def test_pictures_take_the_colours_of_the_page(markup):
  pictures = re.findall(r"<svg.*?</svg>", markup, re.S)
  assert len(pictures) > 8
  for picture in pictures:
    assert "#000000" not in picture
    assert "font-family" not in picture
  assert any("var(--m4)" in picture for picture in pictures)


def test_the_largest_parts_give_way_first():
  parts = [
    page.Part(letter * size, "-")
    for letter, size in zip("abc", (5, 9, 2), strict=True)
  ]
  assert page.fitted(parts, 16) == ["aaaaa", "bbbbbbbbb", "cc"]
  assert page.fitted(parts, 8) == ["aaaaa", "-", "cc"]
  assert page.fitted(parts, 4) == ["-", "-", "cc"]
