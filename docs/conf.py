"""Sphinx's settings for the documentation site: `make docs` copies this file to the sources that it gathers."""

import os
from pathlib import Path

os.environ["MOE_NUMBA_SIMULATE"] = "1"  # the functions' modules are imported, which must not need a GPU
import moe_numba  # noqa: E402

project = "moe_numba"
author = "The moe_numba authors"
copyright = author
release = moe_numba.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
    "sphinx_design",
    "sphinx_copybutton",
]
exclude_patterns = ["parts/*", "extra/*"]
templates_path = ["_templates"]

nb_execution_mode = "off"  # the notebooks are committed as an H200 executed them
nb_merge_streams = True
nb_code_prompt_show = "Show the imports"  # only cells of imports are folded
nb_code_prompt_hide = "Hide the imports"
nb_render_markdown_format = "gfm"  # outputs have tables
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_default_options = {"exclude-members": "extra_repr"}  # torch calls it
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
python_maximum_signature_line_length = 100
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "pydata_sphinx_theme"
html_title = "moe_numba"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_search_scorer = str(Path(__file__).parent / "_static/scorer.js")
html_favicon = "_static/icon.svg"
html_extra_path = ["extra"]
html_show_sourcelink = False
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": "moe_numba", "image_light": "_static/icon.svg", "image_dark": "_static/icon.svg"},
    "header_links_before_dropdown": 8,
    "navbar_end": ["theme-switcher"],
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "show_nav_level": 1,
    "navigation_with_keys": False,
    "back_to_top_button": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "default",
    "pygments_dark_style": "github-dark",
}
# GitHub's workflows set these: the address of the site, and of the repository.
html_baseurl = os.environ.get("SITE_URL", "")
if "GITHUB_REPOSITORY" in os.environ:
    html_theme_options["github_url"] = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
html_sidebars = {"index": [], "playground": [], "measurements": [], "gpus": [], "search": []}
copybutton_exclude = ".linenos, .gp, .go"


def setup(app):
    """Leave out the fields of named tuples: "Alias for field number 0". Docstrings describe them."""
    is_field = lambda app, what, name, member, skip, options: True if type(member).__name__ == "_tuplegetter" else None
    app.connect("autodoc-skip-member", is_field)
