"""Configures Sphinx: `make docs` builds the site into docs/_build/html."""

import os
from pathlib import Path
import sys
import tomllib

ROOT = Path(__file__).parent.parent
# The imports below and the kernels of notebooks need the root on the path.
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = str(ROOT)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from attention import __version__  # noqa: E402
from docs.pages import source_link  # noqa: E402

project = "Attention laboratory"
author = "the authors of the Attention laboratory"
version = release = __version__
html_title = f"{project} {version}"
with (ROOT / "pyproject.toml").open("rb") as file:
  repository = tomllib.load(file)["project"]["urls"]["Repository"]

extensions = [
  "myst_nb",
  "notfound.extension",
  "sphinx.ext.autodoc",
  "sphinx.ext.autosummary",
  "sphinx.ext.linkcode",
  "sphinx.ext.napoleon",
  "sphinx_copybutton",
  "sphinx_design",
  "docs.notebooks",
  "docs.pages",
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build", "results", "requirements.txt"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_fence_as_directive = ["math"]
myst_heading_anchors = 4
myst_url_schemes = {"http": None, "https": None, "mailto": None, "source": None}
# A notebook runs again if it or a file that it uses changed: docs/notebooks.py.
nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "docs/_build/notebooks")
if os.environ.get("NOTEBOOKS") == "first":
  nb_execution_excludepatterns = ["tutorials/[!0]*"]
  # Notebooks that are not executed do not name their lexer.
  suppress_warnings = ["myst-nb.lexer"]
# Slow machines need more than the default limit.
nb_execution_timeout = -1
nb_execution_show_tb = True
nb_merge_streams = True

# Quotes and ellipses only: two hyphens start a flag.
smartquotes_action = "qe"
autosummary_generate = False
linkcode_resolve = source_link
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
maximum_signature_line_length = 78
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False
default_role = "code"

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
  "show_toc_level": 2,
  "show_navbar_depth": 1,
  "navbar_persistent": [],
  "use_download_button": False,
  "use_fullscreen_button": False,
  "use_edit_page_button": True,
  "pygments_light_style": "a11y-high-contrast-light",
  "pygments_dark_style": "a11y-high-contrast-dark",
}
html_context = {
  "default_mode": "auto",
  "edit_page_provider_name": "GitHub",
  # `docs.pages` sets `edited_file`: some pages are generated from other files.
  "edit_page_url_template": f"{repository}/edit/main/{{{{ edited_file or file_name }}}}",
}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
# A server shows 404.html at any address, so its links start at the root.
notfound_urls_prefix = os.environ.get("SITE_PREFIX", "/")
