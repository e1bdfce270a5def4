"""Builds the documentation site: ``make docs``."""

from __future__ import annotations

import re
from typing import Any

import piecewise

project = "piecewise-prefill"
release = piecewise.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results"]
html_theme = "furo"
html_title = f"{project} {release}"
html_copy_source = False
smartquotes = False

# Headings can be linked to by the names that GitHub gives them.
myst_heading_anchors = 3

# Docstrings write code between single backticks.
default_role = "code"
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True}
napoleon_numpy_docstring = False
napoleon_attr_annotations = False


def inside_the_site(app: Any, docname: str, source: list[str]) -> None:
    """Turns links to pages that lie at the root of the repository into links to their copies here."""
    source[0] = re.sub(r"\]\(\.\./(CONTRIBUTING|CHANGELOG)\.md", lambda m: f"]({m[1].lower()}.md", source[0])


def setup(app: Any) -> None:
    app.connect("source-read", inside_the_site)
