"""Diffs of kernels as notebooks show them: `moe_numba.course.steps.source_diff`."""

from html.parser import HTMLParser

import pytest

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda

from moe_numba.course.steps.source_diff import change, listing, passage


@cuda.jit
def narrow(x, y, n):
    i = cuda.grid(1)
    first = 4 * i
    for k in range(4):
        if first + k < n:
            y[first + k] = x[first + k] < 1
    a = 1
    b = 2
    c = 3
    d = 4
    y[0] = a + b + c + d


@cuda.jit
def wide(x, y, n):
    i = cuda.grid(1)
    first = 4 * i
    if first < n:
        y[first : first + 4] = x[first : first + 4] < 1
    a = 1
    b = 2
    c = 3
    d = 4
    y[0] = a + b + c + d


class Text(HTMLParser):
    """Collects the text of HTML, and its tags, which must be balanced."""

    def __init__(self):
        super().__init__()
        self.open, self.text, self.classes = [], "", []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.classes.append(dict(attributes).get("class"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data + "\n"


def test_only_changed_lines_and_their_context_are_shown():
    lines = str(change(narrow, wide)).splitlines()
    assert lines == [
        "@@ lines 3 to 8 @@",
        "      i = cuda.grid(1)",
        "      first = 4 * i",
        "-     for k in range(4):",
        "-         if first + k < n:",
        "-             y[first + k] = x[first + k] < 1",
        "+     if first < n:",
        "+         y[first : first + 4] = x[first : first + 4] < 1",
        "      a = 1",
        "      b = 2",
    ]
    assert "@@ lines 4 to 7 @@" in str(change(narrow, wide, context=1)).splitlines()


def test_html_has_all_lines_in_colours_and_the_whole_kernel():
    shown, parser = change(narrow, wide), Text()
    parser.feed(shown._repr_html_())
    assert not parser.open and "< 1" in parser.text
    assert parser.classes.count("line added") == 2 and parser.classes.count("line removed") == 3
    assert parser.text.count("y[0] = a + b + c + d") == 1 and "the whole of wide" in parser.text


def test_viewers_without_styles_get_a_diff_in_markdown():
    data = change(narrow, wide)._repr_mimebundle_()
    assert (
        data["text/markdown"].startswith("```diff\n@@ lines 3 to 8 @@")
        and "<summary>the whole of wide" in data["text/markdown"]
    )
    assert data["text/plain"] == str(change(narrow, wide))


def test_equal_kernels_are_refused():
    with pytest.raises(ValueError, match="wide has the same source"):
        change(wide, wide)


def make_double(factor):
    @cuda.jit(device=True)
    def double(x):
        return factor * x

    return double


def test_a_listing_shows_a_function_that_a_factory_makes():
    assert listing((make_double, "double")).data == (
        "```python\n@cuda.jit(device=True)\ndef double(x):\n    return factor * x\n```"
    )
    assert listing(narrow).data.startswith("```python\n@cuda.jit\ndef narrow(x, y, n):\n    i = cuda.grid(1)\n")
    assert listing(narrow, wide).data.count("@cuda.jit") == 2
    with pytest.raises(ValueError, match="make_double defines no function treble"):
        listing((make_double, "treble"))


def test_a_passage_ends_with_its_last_line():
    assert passage(narrow, "for k", "y[first").data == (
        "```python\nfor k in range(4):\n    if first + k < n:\n        y[first + k] = x[first + k] < 1\n```"
    )
    with pytest.raises(ValueError, match="narrow has no passage from 'y = 0' to 'c = 3'"):
        passage(narrow, "y = 0", "c = 3")
