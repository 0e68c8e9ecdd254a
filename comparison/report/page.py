"""One HTML file that opens offline: text, sortable tables, figures."""

import base64
from collections.abc import Sequence
import datetime
import functools
import gzip
import html
import io
from pathlib import Path
import re
from typing import Any, NamedTuple

from itables.utils import read_package_file
import jinja2
from markupsafe import Markup
from PIL import Image

from comparison.report import style
from comparison.report.tables import Table

LIMIT = 1_000_000
"""Size limit of a page in bytes; the script of the tables takes a quarter of it."""


_DPI = 150


class Picture(NamedTuple):
  """A figure of a page.

  Attributes:
    stem: name of its files in plots/.
    figure: figure of matplotlib.
    caption: caption of the figure.
  """

  stem: str
  figure: Any
  caption: str


class Section(NamedTuple):
  """A section of a page: paragraphs, tables and pictures in order.

  Attributes:
    title: heading of the section.
    parts: a string is a paragraph, and a list of strings a list of notes; strings may
      have `code` in backticks. A pair is a title and its table.
  """

  title: str
  parts: Sequence[str | list[str] | tuple[str, Table] | Picture]


def render(
  title: str,
  byline: str,
  sections: Sequence[Section],
  plots: Path,
  limit: int = LIMIT,
) -> str:
  """Renders the HTML of the page.

  The page uses DataTables, from the bundle in itables, to sort and search tables and to
  hide columns. If the page would exceed `limit`, the largest pictures become links.

  Args:
    title: heading of the page.
    byline: the machine and the versions.
    sections: the sections from top to bottom.
    plots: the folder to which `save` has written the pictures.
    limit: size limit in bytes.
  """
  images = {
    part.stem: _webp(plots / f"{part.stem}.png")
    for section in sections
    for part in section.parts
    if isinstance(part, Picture)
  }
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
  )
  environment.filters.update(prose=prose, anchor=anchor)
  template = environment.get_template("page.html.jinja")
  while True:
    page = template.render(
      title=title,
      byline=f"{datetime.date.today().isoformat()}; {byline}",
      sections=sections,
      images=images,
      isinstance=isinstance,
      list=list,
      Picture=Picture,
      script=_bundle("dt_bundle.js"),
      style=_bundle("dt_bundle.css"),
    )
    if len(page.encode()) <= limit or not images:
      return page
    del images[max(images, key=lambda stem: len(images[stem]))]


def save(folder: Path, pictures: Sequence[Picture]) -> None:
  """Writes every picture as PNG and SVG."""
  folder.mkdir(exist_ok=True)
  with style.look():
    for picture in pictures:
      figure, path = picture.figure, folder / picture.stem
      figure.set_dpi(_DPI)
      # Compute the layout once for both files.
      figure.draw_without_rendering()
      figure.set_layout_engine("none")
      figure.savefig(path.with_name(f"{picture.stem}.png"), dpi=_DPI)
      # A date would change the file in each call.
      svg = path.with_name(f"{picture.stem}.svg")
      figure.savefig(svg, metadata={"Date": None})


def prose(text: str) -> Markup:
  """Escapes a text, and turns parts in backticks into code."""
  escaped = html.escape(text)
  return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", escaped))


def anchor(text: str) -> str:
  """Converts a text to a file name or an anchor: 'paper/needle' to 'paper-needle'."""
  return re.sub(r"[^\w.-]+", "-", text)


def _webp(path: Path) -> str:
  """A picture as WebP in base64, a third of the size of PNG or SVG."""
  target = io.BytesIO()
  with Image.open(path) as image:
    size = (image.width * 3 // 4, image.height * 3 // 4)
    small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
    small.save(target, format="webp", quality=60, method=6)
  return base64.b64encode(target.getvalue()).decode()


@functools.cache
def _bundle(name: str) -> str:
  """A file of itables, gzipped, in base64; browsers can decompress it."""
  content = read_package_file(f"html/{name}")
  packed = gzip.compress(str(content).encode(), mtime=0)
  return base64.b64encode(packed).decode()
