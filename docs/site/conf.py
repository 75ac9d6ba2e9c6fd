"""Sphinx configuration of the documentation, whose sources `python -m docs.site` writes."""

import os

import latex2mathml.converter
from docutils import nodes

smartquotes = False  # "--flag" stays as it is
project = "tfx_jax"
author = "the authors of tfx_jax"
copyright = author
extensions = ["myst_parser", "sphinx_design", "sphinx_copybutton"]
templates_path: list[str] = []

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
nitpicky = True

html_math_renderer = "mathml"
html_theme = "sphinx_book_theme"
html_title = "tfx_jax"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_copyright = False
html_theme_options = {
    "repository_url": "https://github.com/tfx-jax/tfx-jax",
    "use_repository_button": True,
    "use_issues_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_navbar_depth": 1,
    "collapse_navigation": True,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
# The workflow that deploys the site names the version of a build, "main" or a tag. Its pages then have a menu of all
# versions, which they read from a file in the root of the site.
version = os.environ.get("DOCS_VERSION", "")
if version:
    _versions = "versions.json" if version == "main" else "../versions.json"
    html_theme_options |= {"switcher": {"json_url": _versions, "version_match": version}, "check_switcher": False}
    _sidebar = ["navbar-logo", "icon-links", "version-switcher", "search-button-field", "sbt-sidebar-nav"]
    html_sidebars = {"**": [f"{name}.html" for name in _sidebar]}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def setup(app):
    """Called by Sphinx: formulas become MathML, which browsers typeset without a script, and llms.txt is copied."""
    app.connect("config-inited", lambda app, config: config.html_extra_path.append(str(app.srcdir / "root")))
    app.add_html_math_renderer("mathml", (_math("inline"), None), (_math("block"), None))


def _math(display):
    """Returns the function that writes a formula into a page; `display` is "inline" or "block"."""

    def write(translator, node):
        mathml = latex2mathml.converter.convert(node.astext(), display=display)
        translator.body.append(mathml if display == "inline" else f'<div class="formula">{mathml}</div>\n')
        raise nodes.SkipNode

    return write
