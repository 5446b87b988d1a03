"""How Sphinx builds these pages: no network, and every warning is an error (`sphinx-build -W -n docs site`)."""

import pathlib
import tomllib

_project = tomllib.loads((pathlib.Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]

project = "jaxguard"
author = "jaxguard authors"
copyright = "jaxguard authors"  # noqa: A001 – Sphinx's name
release = version = _project["version"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"jaxguard {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3  # headings can be linked as page.md#heading

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# Only jaxguard's public names are looked up: those of others would need their inventories, from the network.
nitpick_ignore_regex = [(r"py:.*", r"(?!jaxguard\.[^_]).*")]
