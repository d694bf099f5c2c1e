"""Colours, fonts and the figure class that all figures and pictures share."""

import io

import matplotlib
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish.
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
INK, GREY, PALE = "#222222", "#777777", "#B8B8B8"
BROWN = "#9A6400"  # dark orange, legible as text
COLOURS = (BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY)
WIDTH, ROW, COLUMN = 9.2, 0.34, 0.88  # inches: a figure, a row of bars, a column of numbers

STYLE = {
    "font.family": "DejaVu Sans",  # part of matplotlib, so figures look the same everywhere
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": PALE,
    "axes.labelcolor": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "grid.color": "#E6E6E6",
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "savefig.dpi": 150,
    "svg.hashsalt": "moe_numba",  # the same rows produce the same file
}


# Drawn for white paper; in the dark, lightness is inverted, and hues stay what they are. Other fonts are as wide.
_DARK = """<style>
.picture text { font-family: "DejaVu Sans", Verdana, sans-serif !important }
@media (prefers-color-scheme: dark) { .picture { filter: invert(.93) hue-rotate(180deg) } }
</style>"""


class Picture(Figure):
    """A figure that notebooks display without pyplot, in light and dark."""

    def _repr_svg_(self):
        data = io.StringIO()
        with matplotlib.rc_context(STYLE | {"svg.fonttype": "none"}):
            self.savefig(data, format="svg", metadata={"Date": None, "Creator": None})
        text = data.getvalue()
        head, svg, body = text[text.index("<svg") :].partition("<svg")
        attributes, end, body = body.partition(">")
        return f'{head}{svg} class="picture"{attributes}{end}{_DARK}{body}'
