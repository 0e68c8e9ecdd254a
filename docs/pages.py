"""Extends Sphinx with what the pages of this site need.

- The build replaces a block ```` ```{generated} NAME ```` ```` by `page()` of the
  module NAME, or by the Markdown file NAME of this repository. The text in the block
  is for readers of the file.
- It replaces a block ```` ```{reference} MODULE ```` ````, which has one name per
  line, by a table of these names and their docstrings.
- Each mechanism has its own page: see docs/mechanism_pages.py.
- A relative link to a file outside docs/ leads to the page that shows the file, or
  to a page with its source. A link to a missing file is a warning.
- Docstrings are plain text with `code`; they become reStructuredText.
- Formulas become MathML, which browsers show without a script.
- Lines do not break between a number and its %.
"""

from collections.abc import Mapping, Sequence
import functools
import html
import importlib
import inspect
import logging
import os
from pathlib import Path
import re
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from numpy.typing import ArrayLike
from sphinx.util.typing import stringify_annotation

from attention import ATTENTIONS
from docs import mechanism_pages

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"

_LOG = logging.getLogger("sphinx.docs")

_GENERATED = re.compile(r"^```\{generated\} (\S+)\n.*?^```$", re.M | re.S)
_REFERENCE = re.compile(r"^```\{reference\} (\S+)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(
  r"^(?P<fence>```+)(?P<info>.*?)\n(?P<body>.*?)^(?P=fence)$|`[^`\n]+`"
  r"|\]\((?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)",
  re.MULTILINE | re.DOTALL,
)
"""A fenced block, inline code, or a link with its path and anchor."""

_SOURCE = "source"
"""The folder of pages that show source files, and the scheme of links to them."""


def setup(app: Any) -> Mapping[str, Any]:
  """Connects the hooks."""
  app.connect("builder-inited", lambda app: mechanism_pages.write())
  app.connect("source-read", expand)
  app.connect("doctree-resolved", resolve_sources)
  app.connect("html-page-context", set_edited_file)
  app.add_config_value("repository", "", "html")
  app.connect("build-finished", write_sources)
  # Before napoleon, which reads the output.
  app.connect("autodoc-process-docstring", markup, priority=100)
  app.connect("autodoc-process-signature", short_types)
  app.connect("autodoc-skip-member", is_field)
  app.add_html_math_renderer("mathml", (math, None), (math, None))
  return {"parallel_read_safe": False}


@functools.cache
def file_pages() -> Mapping[str, str]:
  """Returns file of this repository -> the page that shows it."""
  pages = {}
  for page in DOCS.rglob("*.md"):
    if page.parent.name == "results":
      continue  # results.md shows parts of these tables.
    docname = page.relative_to(DOCS).with_suffix("").as_posix()
    pages[page.relative_to(ROOT).as_posix()] = docname
    for name in _GENERATED.findall(page.read_text("utf-8")):
      if name.endswith(".md"):
        pages[name] = docname
  return pages


def set_edited_file(
  app: Any, pagename: str, template: str, context: dict[str, Any], doctree: Any
) -> None:
  """Sets the file that the link "Suggest edit" of a page opens."""
  del app, template, doctree
  page_file = f"docs/{pagename}.md"
  files = (file for file, page in file_pages().items() if page == pagename)
  source = next((file for file in files if file != page_file), page_file)
  if pagename.startswith("mechanisms/"):
    source = "docs/mechanisms.md"
  context["edited_file"] = source


def expand(app: Any, docname: str, content: list[str]) -> None:
  """Inserts generated text into a page and rewrites its links to files."""
  page = Path(app.env.doc2path(docname)).relative_to(ROOT)
  if page.suffix != ".md":
    return

  def generated(match: re.Match[str]) -> str:
    name = match[1]
    if name.endswith(".md"):
      return _link((ROOT / name).read_text("utf-8"), Path(name), docname)
    return _link(importlib.import_module(name).page(), page, docname)

  text = content[0]
  if docname == "mechanisms":
    text = mechanism_pages.overview(text)
  if docname.startswith("mechanisms/"):
    text, page = mechanism_pages.page(page.stem), DOCS.relative_to(ROOT) / "_"
  text = _GENERATED.sub(generated, _link(text, page, docname))
  content[0] = _REFERENCE.sub(_reference, text)


def _reference(match: re.Match[str]) -> str:
  """Returns the directives for the names of a `reference` block."""
  module, names = match[1], match[2].split()
  lines = ["```{eval-rst}", f".. currentmodule:: {module}", ""]
  lines += [".. autosummary::", "   :nosignatures:", ""]
  lines += [*(f"   {name}" for name in names), ""]
  for name in names:
    item: Any = importlib.import_module(module)
    for part in name.split("."):
      item = getattr(item, part)
    kind = "class" if isinstance(item, type) else "function"
    members = ["   :members:"] if kind == "class" else []
    lines += [f".. auto{kind}:: {name}", *members, ""]
  return "\n".join([*lines, "```"])


def _link(text: str, file: Path, docname: str) -> str:
  """Returns the text of a file with links to the pages of the site."""

  def replace(match: re.Match[str]) -> str:
    path, anchor = match["path"], match["anchor"] or ""
    info = match["info"] or ""
    if info.startswith("{") and "code-cell" not in info:
      body = _link(match["body"], file, docname)
      return f"{match['fence']}{info}\n{body}{match['fence']}"
    if not path or ":" in path or path.startswith("/"):
      return match[0]
    target = Path(os.path.normpath(file.parent / path))
    if not (ROOT / target).exists():
      _LOG.warning(f"no file {target}", extra={"location": docname})
      return match[0]
    if page := file_pages().get(target.as_posix()):
      if page == "mechanisms" and anchor[1:] in ATTENTIONS:
        page, anchor = f"{page}/{anchor[1:]}", ""
      return f"](/{page}.md{anchor})"
    is_asset = target.suffix != ".md" and "docs" in target.parts
    if is_asset or target.suffix == ".png":
      return f"](/{os.path.relpath(target, 'docs')})"
    _linked_files.add(target.as_posix())
    return f"]({_SOURCE}:{target.as_posix()})"

  return _LINK.sub(replace, text)


_linked_files: set[str] = set()
"""Linked files and folders that no page of the site shows."""


def resolve_sources(app: Any, doctree: Any, docname: str) -> None:
  """Resolves links of the scheme `source` to the pages of `write_sources`.

  It also keeps percentages on one line, and gives code that is wider than a phone
  the class `long`.
  """
  for node in doctree.findall(nodes.literal):
    if max(map(len, node.astext().split()), default=0) > 40:
      node["classes"].append("long")
  for node in list(doctree.findall(nodes.Text)):
    if " %" in node and not isinstance(node.parent, nodes.FixedTextElement):
      text = re.sub(r"(?<=\d) %", "\N{NO-BREAK SPACE}%", node)
      node.parent.replace(node, nodes.Text(text))
  for node in doctree.findall():
    uri = node.get("refuri", "") if node.tagname == "reference" else ""
    if uri.startswith(f"{_SOURCE}:"):
      path = f"{_SOURCE}/{uri.partition(':')[2]}.html"
      node["refuri"] = os.path.relpath(path, os.path.dirname(docname))
      node["internal"] = True


def source_link(domain: str, info: Mapping[str, str]) -> str | None:
  """Returns the address of a name's source, relative to reference/."""
  if domain != "py":
    return None
  item: Any = importlib.import_module(info["module"])
  for part in info["fullname"].split("."):
    item = getattr(item, part, None)
  function: Any = getattr(item, "fget", item)
  item = inspect.unwrap(function)
  try:
    path = Path(inspect.getsourcefile(item) or "").relative_to(ROOT)
    line = inspect.getsourcelines(item)[1]
  except (TypeError, ValueError, OSError):
    return None
  _linked_files.add(path.as_posix())
  return f"../{_SOURCE}/{path.as_posix()}.html#L-{line}"


def write_sources(app: Any, exception: Exception | None) -> None:
  """Writes a page per linked file, per file of a linked folder, and per folder."""
  if exception or app.builder.format != "html":
    return
  from pygments import formatters, highlight, lexers
  from pygments.util import ClassNotFound

  folders = [name for name in _linked_files if (ROOT / name).is_dir()]
  files = _linked_files - {*folders}
  for folder in folders:
    names = [
      path.name
      for path in sorted((ROOT / folder).iterdir())
      if path.suffix in (".py", ".md")
    ]
    files |= {f"{folder}/{name}" for name in names}
    items = (
      f'<li><a href="{Path(folder).name}/{name}.html">{name}</a></li>'
      for name in names
    )
    _write_page(app, folder, f"<ul>{''.join(items)}</ul>")
  lines = formatters.HtmlFormatter(linenos="inline", lineanchors="L")
  for name in files:
    code = (ROOT / name).read_text("utf-8")
    try:
      lexer = lexers.get_lexer_for_filename(name, stripnl=False)
    except ClassNotFound:
      lexer = lexers.TextLexer(stripnl=False)
    _write_page(app, name, highlight(code, lexer, lines))


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name}</title>
<link rel="stylesheet" href="{root}_static/pygments.css">
<link rel="stylesheet" href="{root}_static/source.css">
<script>
const mode = localStorage.getItem("mode");
const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme =
  ["light", "dark"].includes(mode) ? mode : isDark ? "dark" : "light";
</script>
</head>
<body>
<nav><a href="{root}index.html">{project}</a></nav>
<main tabindex="0">
<h1>{name}</h1>
{body}
</main>
</body>
</html>
"""


def _write_page(app: Any, name: str, body: str) -> None:
  path = Path(app.outdir, _SOURCE, f"{name}.html")
  path.parent.mkdir(parents=True, exist_ok=True)
  root = "../" * (name.count("/") + 1)
  text = _PAGE.format(
    name=html.escape(name), root=root, body=body, project=app.config.project
  )
  path.write_text(text, "utf-8")


def math(translator: Any, node: nodes.math | nodes.math_block) -> None:
  """Writes a formula as MathML."""
  is_block = isinstance(node, nodes.math_block)
  try:
    formula = tex2mathml(node.astext(), as_block=is_block)
    if is_block:
      formula = f'<div class="formula">{formula}</div>\n'
    translator.body.append(formula)
  except MathError as error:
    _LOG.warning(f"formula: {error}", extra={"location": node})
  raise nodes.SkipNode


_SECTIONS = ("Args:", "Attributes:", "Raises:")


def markup(
  app: Any, what: str, name: str, item: Any, options: Any, lines: list[str]
) -> None:
  """Converts a docstring into reStructuredText."""
  del app, what, name, item, options
  lines[:] = docstring(lines)


def docstring(lines: Sequence[str]) -> list[str]:
  """Returns a docstring in reStructuredText, with sections for napoleon.

  Indented blocks outside sections are code. Single backticks become double ones,
  and markup outside code is escaped. Napoleon would read the text under Returns up
  to a colon as a type, so that section becomes a field.
  """
  marked: list[str] = []
  in_section = in_code = in_span = False
  for before, line in zip(["", *lines], lines, strict=False):
    indent = len(line) - len(line.lstrip())
    if line and not indent:
      in_section, in_code = line in (*_SECTIONS, "Returns:"), False
    elif indent and not in_section and not before and not in_code:
      marked += ["::", ""]
      in_code = True
    if line == "Returns:":
      marked.append(":returns:")
    elif in_code or not line or line in _SECTIONS:
      marked.append(line)
    else:
      # A code span may continue on the next line.
      texts = []
      for k, text in enumerate(line.split("`")):
        in_span ^= k > 0
        texts.append(text if in_span else _MARKUP.sub(r"\\\g<0>", text))
      marked.append("``".join(texts))
  return marked


_MARKUP = re.compile(r"[*\\|]|_(?!\w)")

_MODULES = re.compile(r"~?\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])")

_ARRAY_LIKE = _MODULES.sub("", stringify_annotation(ArrayLike))
"""The union that NumPy's `ArrayLike` stands for."""


def short_types(
  app: Any,
  what: str,
  name: str,
  item: Any,
  options: Any,
  signature: str | None,
  returned: str | None,
) -> tuple[str | None, str | None]:
  """Shortens the names of types, such as `jaxlib._jax.Array` to `Array`."""
  del app, what, name, item, options

  def short(text: str | None) -> str | None:
    text = text and re.sub(r"<function [^>]*<?lambda>?>", "...", text)
    return text and _MODULES.sub("", text).replace(_ARRAY_LIKE, "ArrayLike")

  return short(signature), short(returned)


def is_field(
  app: Any, what: str, name: str, item: Any, skip: bool, options: Any
) -> bool | None:
  """Skips the fields of a NamedTuple, which its docstring describes."""
  del app, what, name, skip, options
  return type(item).__name__ == "_tuplegetter" or None
