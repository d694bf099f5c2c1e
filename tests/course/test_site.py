"""Sources of the documentation site: links that lead to pages, lessons of the table of topics, parts of the README."""

from pathlib import Path

import nbformat
import pytest

from moe_numba.course.pages import site
from moe_numba.course.pages.html import legible
from moe_numba.course.pages.topics import TOPICS

ROOT = Path(__file__).parents[2]
WHERE = site.pages(ROOT)


@pytest.mark.parametrize(
    "file, before, after",
    [
        ("docs/usage.md", "[lesson](../notebooks/01_gate_prompt.ipynb)", "[lesson](course/01_gate_prompt.ipynb)"),
        ("docs/usage.md", "[`a`](../moe_numba/gate/api.py) [b](gpus.md#x)", "`a` [b](gpus.md#x)"),
        ("docs/usage.md", "[c](../CHANGELOG.md) [d](https://a.org)", "[c](changelog.md) [d](https://a.org)"),
        (
            "docs/usage.md",
            "[e](examples) [f](examples/cupy_routing.py)",
            "[e](examples.md) [f](examples.md#cupy_routingpy)",
        ),
        ("docs/usage.md", "```\n[g](nowhere.md)\n```\n`[h](no.md)`", "```\n[g](nowhere.md)\n```\n`[h](no.md)`"),
        ("docs/usage.md", "![k](figures/align-ladder.svg)", "![k](figures/align-ladder.svg)"),
        ("README.md", "[l](#the-course) [m](docs/gpus.md) [n](#limits)", "[l](course.md) [m](gpus.md) n"),
        ("moe_numba/simulator/README.md", "[o](../../docs/playground)", "[o](playground.md)"),
        ("notebooks/01_gate_prompt.ipynb", "[p](../docs/claims.md#gate)", "[p](../claims.md#gate)"),
        ("notebooks/01_gate_prompt.ipynb", "[q](02_gate_decode.ipynb)", "[q](02_gate_decode.ipynb)"),
        ("notebooks/01_gate_prompt.ipynb", "[s](#Sources:-two)", "[s](#sources-two)"),
    ],
)
def test_links_lead_to_the_pages_of_the_site(file, before, after):
    assert site.relink(before, file, WHERE[file], WHERE, ROOT) == after


def test_a_link_to_nothing_is_an_error():
    with pytest.raises(ValueError, match="docs/usage.md links to nowhere.md, which does not exist"):
        site.relink("[a](nowhere.md)", "docs/usage.md", "usage.md", WHERE, ROOT)


def test_html_of_an_output_links_to_built_pages():
    file = "notebooks/15_moe_layer.ipynb"
    text = site.relink('<a href="../docs/usage.md#install">', file, WHERE[file], WHERE, ROOT, built=True)
    assert text == '<a href="../usage.html#install">'


def test_the_course_has_every_lesson_with_a_notebook(tmp_path):
    made = site.gather(tmp_path / "site", ROOT)
    lessons = [f"course/{topic.notebook}.ipynb" for topic in TOPICS if f"notebooks/{topic.notebook}.ipynb" in WHERE]
    assert [page for page in made if page.startswith("course/")] == lessons
    listed = (tmp_path / "site/parts/lessons.md").read_text()
    assert [listed.index(page.removesuffix(".ipynb")) for page in lessons] == sorted(
        listed.index(page.removesuffix(".ipynb")) for page in lessons
    )
    notebook = nbformat.read(tmp_path / "site" / lessons[3], as_version=4)
    kinds = {kind for cell in notebook.cells for output in cell.get("outputs", ()) for kind in output.get("data", ())}
    assert "image/svg+xml" not in kinds and "text/html" in kinds


def test_parts_of_the_readme():
    parts = site.sections("# name\nabout\n## The course\na\n### more\nb\n## Install\n")
    assert parts == {"introduction": "\nabout\n", "the-course": "\na\n### more\nb\n", "install": "\n"}
    assert {"introduction", "results", "install", "the-course"} <= site.sections(
        (ROOT / "README.md").read_text()
    ).keys()


def test_figures_are_never_shown_so_small_that_their_text_is_below_9_px():
    svg = '<svg class="picture" viewBox="0 0 600 100"><text style="font: 6px sans">a</text><text font-size="8"/></svg>'
    assert 'min-width: 900px; height: auto">' in legible(svg)
    assert 'min-width: 450px; height: auto; color: red"' in legible(
        '<svg style="color: red" viewBox="0 0 600 9"></svg>'
    )
    assert legible("<svg><text>no box</text></svg>") == "<svg><text>no box</text></svg>"


def test_imports_are_folded_and_kernels_are_not():
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{file.name}"
        page = site.lesson(nbformat.read(file, as_version=4), name, WHERE, ROOT)
        folded = [cell.source for cell in page.cells if "hide-input" in cell.metadata.get("tags", ())]
        assert folded and not any("@cuda.jit" in source or "def " in source for source in folded), name
    assert not site.is_mostly_imports("from numba import cuda\n" + "print(1)\n" * 10)
