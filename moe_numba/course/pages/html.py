"""Pages of executed notebooks: HTML files that load nothing, for desktops and phones, in light and dark."""

import html
import math
import re
from collections.abc import Mapping

import nbformat

# Folded cells, which Jupyter shows without their code, keep it below a summary line.
_TEMPLATE = """
{%- extends "basic/index.html.j2" -%}
{%- block input -%}
{%- if cell.metadata.get("jupyter", {}).get("source_hidden") -%}
<details class="folded"><summary>code</summary>{{ super() }}</details>
{%- else -%}{{ super() }}{%- endif -%}
{%- endblock input -%}
"""
# Figures are drawn for white paper, or choose their colours themselves. A PNG is inverted in the dark, hues are kept.
_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --quiet: #59636e; --rule: #d1d9e0; --code: #f6f8fa;
  --link: #0550ae }
body { margin: 0 auto; padding: 0 1rem 4rem; max-width: 58rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.6 system-ui, sans-serif }
a { color: var(--link) } a.anchor-link { visibility: hidden; text-decoration: none; padding-left: .3em }
:is(h1, h2, h3, h4):hover a.anchor-link { visibility: visible }
h1 { line-height: 1.2 } h2 { margin-top: 2.5em; border-bottom: 1px solid var(--rule) }
nav { display: flex; gap: 1rem; justify-content: space-between; padding: .8rem 0; font-size: .9rem }
.prompt { display: none }
pre, code { font: .85rem/1.45 ui-monospace, Menlo, Consolas, monospace }
pre { margin: 0; overflow-x: auto; white-space: pre }
.input_area, .rendered_html pre, details.folded { background: var(--code); border-radius: 6px; padding: .6rem .8rem }
.rendered_html :not(pre) > code { background: var(--code); border-radius: 4px; padding: .1em .3em }
.cell { margin: 1rem 0 } .output_area { margin: .5rem 0; overflow-x: auto }
.output_stderr, .quiet { color: var(--quiet) }
.output_subarea > pre { padding: .2rem .8rem; border-left: 3px solid var(--rule) }
svg, img { max-width: 100%; height: auto }
table { border-collapse: collapse; display: block; overflow-x: auto }
.rendered_html :is(td, th) { padding: .25em .7em; border-bottom: 1px solid var(--rule); text-align: left }
ol.lessons { padding-left: 1.5em } ol.lessons li { margin: .8em 0 }
@media (max-width: 40rem) { .output_png img { max-width: none } }
@media (prefers-color-scheme: dark) {
:root { --paper: #0d1117; --ink: #e6edf3; --quiet: #9198a1; --rule: #3d444d; --code: #161b22; --link: #79b8ff }
.output_png img { filter: invert(.93) hue-rotate(180deg) } }
""".strip()


def title_of(notebook: nbformat.NotebookNode, name: str) -> str:
    """Return the first heading of a notebook, or its name."""
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return next((found[1].strip() for text in texts if (found := re.search(r"^# (.+)$", text, re.MULTILINE))), name)


_SVG = re.compile(r"<svg\b(?P<head>[^>]*)>(?P<body>.*?)</svg>", re.DOTALL)
_FONT_SIZE = re.compile(r'font-size[=:]\s*"?([\d.]+)|\bfont:[^;"}]*?([\d.]+)px')
_PLAYER_FONT_SIZE = 12.0  # of the labels of `draw.player`, which a style sheet of its page sets
SMALLEST_PX = 9.0


def legible(text: str) -> str:
    """Return HTML whose SVGs are never shown so small that text is below 9 px; narrow screens scroll them instead."""

    def wide_enough(found):
        view = re.search(r'viewBox="[\d.-]+ [\d.-]+ ([\d.]+) ', found["head"])
        if not view:
            return found[0]
        sizes = [float(size[0] or size[1]) for size in _FONT_SIZE.findall(found["body"])]
        smallest = min([size for size in sizes if size], default=_PLAYER_FONT_SIZE)
        width = math.ceil(float(view[1]) * SMALLEST_PX / smallest)
        style = f"min-width: {width}px; height: auto"
        head, merged = re.subn(r'\bstyle="', f'style="{style}; ', found["head"], count=1)
        head = head if merged else f'{head} style="{style}"'
        return f'<div style="overflow-x: auto"><svg{head}>{found["body"]}</svg></div>'

    return _SVG.sub(wide_enough, text)


def page_of(notebook: nbformat.NotebookNode, name: str, titles: Mapping[str, str]) -> str:
    """Return the page of an executed notebook.

    Parameters
    ----------
    notebook : notebook
    name : str
        Its name in ``titles``.
    titles : mapping
        Name of each lesson -> its title, in their order: the page links to the ones before and after it, and links
        between notebooks lead to pages.
    """
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(
        embed_images=True, extra_loaders=[DictLoader({"lesson.html.j2": _TEMPLATE})], template_file="lesson.html.j2"
    )
    body, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": name}})
    body = re.sub(
        r'href="(\w+)\.(?:ipynb|py)(#[^"]*)?"',
        lambda link: f'href="{link[1]}.html{link[2] or ""}"' if link[1] in titles else link[0],
        body,
    )
    body = legible(body)
    names = list(titles)
    place = names.index(name)
    link = lambda other, text: f'<a href="{other}.html">{text}</a>'
    before = link(names[place - 1], f"&larr; {html.escape(titles[names[place - 1]])}") if place else "<span></span>"
    after = link(names[place + 1], f"{html.escape(titles[names[place + 1]])} &rarr;") if place + 1 < len(names) else ""
    nav = f"<nav>{before}{link('index', 'all lessons')}{after}</nav>"
    return _document(titles[name], f"{nav}\n{body}\n{nav}")


def index_of(titles: Mapping[str, str], states: Mapping[str, str]) -> str:
    """Return the page that lists the lessons; ``states`` has a word for each that has no page, such as "running"."""
    lines = []
    for name, title in titles.items():
        number, title = name.partition("_")[0], html.escape(title)
        linked = f'<a href="{name}.html">{title}</a>'
        if name in states:
            linked = f'{title} <span class="quiet">{html.escape(states[name])}</span>'
        value = f" value={int(number)}" if number.isdigit() else ""
        lines.append(f"<li{value}>{linked}</li>")
    heading = "<h1>moe_numba: the lessons</h1>"
    return _document("moe_numba: the lessons", f'{heading}\n<ol class="lessons">\n{chr(10).join(lines)}\n</ol>')


def _document(title, body):
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    colours = f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n.highlight {{ background: none !important }}"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title>\n<style>\n{colours}\n{_STYLE}\n</style>"
    )
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'
